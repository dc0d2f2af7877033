"""Checkpoints of a run and the stop in order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megarl.knobs import UserError
from megarl.trainer import recover
from megarl.trainer.recover import Saver, SaverConfig, StopSignal


class Recorder:
    """An engine that only writes a file."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.loaded: Path | None = None

    def save_state(self, folder: Path) -> None:
        (folder / "engine.json").write_text("{}")
        if self.fails:
            raise OSError("disk full")

    def load_state(self, folder: Path) -> None:
        self.loaded = folder


def saver_of(folder: Path, **knobs: Any) -> Saver:
    return Saver(SaverConfig(**knobs), folder)


def test_only_the_newest_checkpoints_are_kept_and_the_last_is_restored(tmp_path: Path) -> None:
    saver, engine = saver_of(tmp_path, keep=2), Recorder()
    for step in (5, 10, 15):
        saver.save(engine, step, {"facts": {"a": step}})
    assert [p.name for p in saver.checkpoints()] == ["step_000010", "step_000015"]
    assert saver.restore(engine) == {"step": 15, "facts": {"a": 15}}
    assert engine.loaded == tmp_path / "step_000015"


def test_a_save_that_failed_leaves_no_checkpoint(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    saver.save(Recorder(), 5, {})
    with pytest.raises(OSError, match="disk full"):
        saver.save(Recorder(fails=True), 10, {})
    assert [p.name for p in saver.checkpoints()] == ["step_000005"]
    saver.save(Recorder(), 10, {})  # what the failed one left is in nobody's way
    assert [p.name for p in saver.checkpoints()] == ["step_000005", "step_000010"]


def test_a_folder_without_a_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no checkpoint"):
        saver_of(tmp_path).restore(Recorder())


@pytest.mark.parametrize(("every", "due"), [(0, []), (3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_checkpoints_are_due_every_so_many_steps(tmp_path: Path, every: int, due: list[int]) -> None:
    saver = saver_of(tmp_path, every_steps=every)
    assert [step for step in range(1, 7) if saver.due(step)] == due


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_later_one_interrupts(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    before = signal.getsignal(number)
    with StopSignal(notes.append) as stop:
        assert not stop.on_all_ranks()
        os.kill(os.getpid(), number)
        assert stop.on_all_ranks()
        assert signal.Signals(number).name in notes[0]
        os.kill(os.getpid(), number)  # the same request once more: a group and its leader were signalled
        assert len(notes) == 1
        monkeypatch.setattr(recover, "REPEAT_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
