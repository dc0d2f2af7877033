"""Reads the end of a process's log, for a message that names its failure."""

from __future__ import annotations

from pathlib import Path


def log_tail(path: Path, lines: int) -> list[str]:
    """Returns the last lines of a log, or one that says why it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        return [f"(it cannot be read: {error})"]
