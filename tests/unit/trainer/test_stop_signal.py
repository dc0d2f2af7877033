"""The orderly stop: the first signal asks for it, a later one interrupts."""

from __future__ import annotations

import os
import signal

import pytest

from megarl.trainer import stop_signal
from megarl.trainer.stop_signal import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_later_one_interrupts(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(stop_signal, "REPEAT_S", 600.0)
    before = signal.getsignal(number)
    with StopSignal(notes.append) as stop:
        assert not stop.on_all_ranks()
        os.kill(os.getpid(), number)
        assert stop.on_all_ranks()
        assert signal.Signals(number).name in notes[0]
        os.kill(os.getpid(), number)  # the same request: a group and its leader are both signalled
        assert len(notes) == 1
        monkeypatch.setattr(stop_signal, "REPEAT_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
