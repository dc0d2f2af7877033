"""Runs a command in the test's own process, and says how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from megarl import cli


def exit_code(command: Callable[[list[str]], int], arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The code that `python -m megarl.train` with these arguments would end with, were it this command."""
    monkeypatch.setattr(sys, "argv", ["megarl.train", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.exit_with(command)
    return int(end.value.code or 0)


def reads_its_configuration(arguments: list[str]) -> int:
    """A command that does nothing else."""
    cli.load(arguments)
    return 0
