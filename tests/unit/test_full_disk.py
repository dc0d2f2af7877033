"""A full disk ends a command with one line that names the file, and exit code 1."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.trainer.checkpoints.saver import CheckpointError
from tests.exit_codes import exit_code


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(command: Callable[[list[str]], int]) -> tuple[int, str]:
        return exit_code(command, [], monkeypatch), capsys.readouterr().err

    return run


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line_and_no_traceback(ends: Callable[..., tuple[int, str]]) -> None:
    def write(_: list[str]) -> int:
        with open("/dev/full", "w") as file:
            file.write("x")
            file.flush()
        return 0

    code, text = ends(write)
    assert code == 1
    assert len(text.splitlines()) == 1
    assert text.startswith("megarl: [Errno 28] No space left on device")
    assert "free space there or set run_root to another disk" in text


def test_a_checkpoint_that_found_the_disk_full_on_another_rank_is_one_line(
    ends: Callable[..., tuple[int, str]],
) -> None:
    full = f"[Errno 122] {os.strerror(errno.EDQUOT)}: '/runs/x/step_000010.writing'"

    def save(_: list[str]) -> int:
        raise CheckpointError(f"the checkpoint of step 10 could not be written; rank 3: {full}")

    code, text = ends(save)
    assert code == 1
    assert len(text.splitlines()) == 1
    assert "checkpoint of step 10 could not be written; rank 3: [Errno 122]" in text


def test_an_error_that_a_full_disk_caused_is_one_line(ends: Callable[..., tuple[int, str]]) -> None:
    def train(_: list[str]) -> int:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x/metrics.jsonl")
        except OSError as error:
            raise RuntimeError("the step failed") from error

    code, text = ends(train)
    assert code == 1
    assert len(text.splitlines()) == 1
    assert "/runs/x/metrics.jsonl" in text


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(_: list[str]) -> int:
        raise OSError(errno.EIO, "Input/output error", "/runs/x")

    with pytest.raises(OSError, match="Input/output error"):
        exit_code(train, [], monkeypatch)
