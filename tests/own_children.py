"""Processes below the test's own, found by their command lines."""

from __future__ import annotations

import contextlib

import psutil


def own_children(text: str, *, recursive: bool = False) -> list[psutil.Process]:
    """Children whose command line contains a text. One that has ended and waits to be reaped has no command line."""
    found = []
    for child in psutil.Process().children(recursive=recursive):
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if text in " ".join(child.cmdline()):
                found.append(child)
    return found
