"""The exit codes on the operator's page are those that commands end with, and no others."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.knobs import UserError
from megarl.parallel import watchdog
from tests.exit_codes import exit_code
from tests.unit.launcher.test_watch import Scripted, watched

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
Ending = Callable[[Path, pytest.MonkeyPatch], int]


def raising(error: BaseException | None) -> Ending:
    """A command that raises `error`, or ends well."""

    def command(_: list[str]) -> int:
        if error is not None:
            raise error
        return 0

    return lambda folder, monkeypatch: exit_code(command, [], monkeypatch)


def killed_by(number: signal.Signals) -> Ending:
    """A rank of the local launcher that a signal ends."""
    return lambda folder, monkeypatch: watched(folder, [Scripted("rank 0", -number)], [], monkeypatch)


def stuck(_: watchdog.Monitor) -> str:
    return "rank 0 makes no progress"


def stuck_under_a_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A rank that makes no progress: the launchers `local` and `ray` watch it from outside."""
    monkeypatch.setattr(watchdog.Monitor, "check", stuck)
    return watched(folder, [Scripted("rank 0", None)], [], monkeypatch)


def stuck_under_guard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A rank that makes no progress: under Slurm and torchrun ranks watch each other."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(watchdog.Monitor, "check", stuck)
    monkeypatch.setattr(watchdog, "os", SimpleNamespace(_exit=leave))
    recorder = SimpleNamespace(beat=lambda: None, flush=lambda: None, beats=1)
    with pytest.raises(SystemExit) as end:
        watchdog._beat(recorder, True, watchdog.Monitor(folder, 1, 60.0))
    return int(end.value.code or 0)


MEANINGS: list[tuple[str, int, Ending]] = [
    ("has ended", 0, raising(None)),
    ("the disk is full", 1, raising(OSError(28, os.strerror(28), "/runs/x/metrics.jsonl"))),
    ("were refused", 2, raising(UserError("seed=x is no number"))),
    ("made no progress", 70, stuck_under_guard),
    ("The local launcher and Ray end with 1 then", 1, stuck_under_a_launcher),
    ("Ctrl-C", 130, raising(KeyboardInterrupt())),
    ("SIGKILL", 137, killed_by(signal.SIGKILL)),
    ("SIGTERM", 143, killed_by(signal.SIGTERM)),
]


def rows() -> dict[int, str]:
    """Codes of the page's table, with their rows."""
    found = re.findall(r"^\| (\d+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {int(code): row for code, row in found}


@pytest.mark.parametrize(("meaning", "code", "ends"), MEANINGS, ids=[meaning for meaning, *_ in MEANINGS])
def test_a_command_ends_with_the_code_of_the_page(
    meaning: str, code: int, ends: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ends(tmp_path, monkeypatch) == code
    assert any(meaning in row for row in rows().values())
    assert meaning in rows()[code] or f"end with {code}" in meaning


def test_the_page_has_no_other_codes() -> None:
    assert set(rows()) == {code for _, code, _ in MEANINGS}
