"""Reads the lines of a file that another process appends to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK = 8 * 2**20  # bytes read at once
TAIL = 64 * 2**10  # bytes read from the end for the last line; more if they hold none
MAX_LINE = 64 * 2**20  # bytes; a longer line is damaged


class GrowingFile:
    """Position in a file of JSON lines. Each `new_lines` reads the lines since the last call.

    A last line without its newline is left for the next time. A file that was replaced or cut, as a resumed run does,
    is read from its beginning. `resets` then rises: callers must drop their results of earlier lines. `damaged` counts
    lines that are no JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resets = self.damaged = 0
        self._offset = 0
        self._inode = -1

    def new_lines(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields `(offset, length in bytes, values)` of each new complete line. A file that is missing has none."""
        try:
            file = self.path.open("rb")
        except OSError:
            self._begin_anew(-1)
            return
        with file:
            self.check()
            size = CHUNK
            while True:
                file.seek(self._offset)
                data = file.read(size)
                end = data.rfind(b"\n") + 1
                if not end and len(data) < size:
                    return
                if not end and size < MAX_LINE:
                    size = min(2 * size, MAX_LINE)
                    continue
                if not end:
                    self.damaged += 1
                    self._offset += len(data)  # the rest of the line is damaged too
                    continue
                start, self._offset, size = self._offset, self._offset + end, CHUNK
                for line in data[:end].split(b"\n")[:-1]:
                    values = parse(line)
                    if values is not None:
                        yield start, len(line), values
                    elif line.strip():
                        self.damaged += 1
                    start += len(line) + 1

    def check(self) -> None:
        """Begins anew, and increments `resets`, if the file was replaced or cut."""
        try:
            found = self.path.stat()
        except OSError:
            self._begin_anew(-1)
            return
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._begin_anew(found.st_ino)

    def _begin_anew(self, inode: int) -> None:
        if self._offset or self.damaged:
            self.resets += 1
        self._offset, self.damaged, self._inode = 0, 0, inode


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if it is none. Bytes that are no UTF-8 become U+FFFD."""
    try:
        values = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def last_line(path: Path) -> dict[str, Any] | None:
    """The last complete line that is a JSON object, among the last CHUNK bytes. Reads TAIL bytes if they hold one."""
    size = TAIL
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            while True:
                start = max(0, end - size)
                file.seek(start)
                lines = file.read(end - start).split(b"\n")[1 if start else 0 : -1]
                found = next((values for line in reversed(lines) if (values := parse(line)) is not None), None)
                if found is not None or not start or size >= CHUNK:
                    return found
                size *= 2
    except OSError:
        return None


def line_at(path: Path, offset: int, length: int) -> dict[str, Any] | None:
    """The JSON object at a place that `new_lines` gave; None if the file has another there now."""
    with path.open("rb") as file:
        file.seek(offset)
        return parse(file.read(length))


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; {} if it is missing or damaged."""
    try:
        return parse(path.read_bytes()) or {}
    except OSError:
        return {}
