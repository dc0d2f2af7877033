"""The manifest of a checkpoint: size and SHA-256 of every file, which tell whole checkpoints from damaged ones.

    step_000040/manifest.json      {"format", "step", "files": {path: [bytes, sha256]}, "sha256": of the rest}

A checkpoint is written as `step_000040.writing` and then renamed. No file points at the latest: manifests are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.knobs import UserError

FORMAT = 2
NAME = "manifest.json"
WRITING, REMOVING = ".writing", ".removing"  # suffixes of folders that are not, or no longer, checkpoints


class Damaged(Exception):
    """A checkpoint differs from what was written. The message names the file and the difference."""


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step and files: bytes and SHA-256 by path within the folder."""

    folder: Path
    step: int
    files: dict[str, tuple[int, str]]

    def check_sizes(self) -> None:
        """Raises Damaged if a file is missing, cannot be looked at, or has another size."""
        for name, (size, _) in self.files.items():
            found = _size(self.folder, name)
            if found != size:
                raise Damaged(f"{name} has {found} bytes, written were {size}")

    def check_content(self, part: int = 0, parts: int = 1) -> None:
        """Raises Damaged if a file's content changed. Reads share `part` of the files, out of `parts`."""
        for name in sorted(self.files)[part::parts]:
            self.check_file(name)

    def check_file(self, name: str) -> None:
        """Raises Damaged if the file is missing, cannot be read, or its content changed."""
        _size(self.folder, name)
        try:
            digest = _sha256(self.folder / name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error})") from error
        if digest != self.files[name][1]:
            raise Damaged(f"{name} is not what was written: its SHA-256 differs")


def _size(folder: Path, name: str) -> int:
    """Bytes of a file. Anything else in its place, such as a pipe that would be waited for, counts as missing.

    Raises:
        Damaged: it is missing, or the disk or its rights do not let it be looked at.
    """
    try:
        if (folder / name).is_file():
            return (folder / name).stat().st_size
    except OSError as error:
        raise Damaged(f"{name} cannot be read ({error})") from error
    raise Damaged(f"{name} is missing")


def describe(folder: Path, paths: Iterable[Path]) -> dict[str, tuple[int, str]]:
    """Bytes and SHA-256 of files under `folder`, each flushed to disk first."""
    files = {}
    for path in paths:
        flush(path)
        files[str(path.relative_to(folder))] = (path.stat().st_size, _sha256(path))
    return files


def seal(folder: Path, step: int, files: dict[str, tuple[int, str]]) -> None:
    """Writes the manifest, and flushes it and the folders to disk."""
    body = {"format": FORMAT, "step": step, "files": {name: list(files[name]) for name in sorted(files)}}
    (folder / NAME).write_text(_text(body))
    for path in (folder / NAME, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        flush(path)


def read(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, and none of its files.

    Raises:
        Damaged: the manifest is missing or was changed.
        UserError: a newer format.
    """
    _size(folder, NAME)
    try:
        text = (folder / NAME).read_text()
        body = json.loads(text)
        version, files = body["format"], body["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{NAME} cannot be read ({error})") from error
    if isinstance(version, int) and version > FORMAT and _is_unchanged(body):
        raise UserError(
            f"{folder} has format {version}, this megarl reads up to {FORMAT}; resume it with a newer megarl"
        )
    if not _is_unchanged(body) or text != _text({k: v for k, v in body.items() if k != "sha256"}):
        raise Damaged(f"{NAME} is not what was written: its SHA-256 differs")
    return Manifest(folder, body["step"], {name: (size, digest) for name, (size, digest) in files.items()})


def step_folders(checkpoints: Path) -> list[Path]:
    """The folders of checkpoints, whole or damaged, newest first."""
    folders = [p for p in checkpoints.glob("step_*") if p.is_dir() and p.suffix not in (WRITING, REMOVING)]
    return sorted(folders, key=_order, reverse=True)


def _order(folder: Path) -> tuple[int, str]:
    """Sorting key: the manifest's step, or the folder's name if the manifest cannot be read."""
    try:
        return read(folder).step, folder.name
    except (Damaged, UserError):
        digits = folder.name.removeprefix("step_")
        return int(digits) if digits.isdecimal() else -1, folder.name


def rename(folder: Path, to: Path) -> None:
    """Renames a folder and flushes the new name to disk."""
    folder.rename(to)
    flush(to.parent)


def _text(body: dict[str, object]) -> str:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1)


def _is_unchanged(body: dict[str, object]) -> bool:
    rest = {k: v for k, v in body.items() if k != "sha256"}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest() == body.get("sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
