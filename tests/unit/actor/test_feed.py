"""Microbatches on their way to the device: order of copies and kernels, and how many are there at once.

Streams write down what they are told. `tests/fake_cuda` finds out whether that suffices.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.actor.batch import feed


class Log:
    """What a feed does, in order, and the copies that are alive."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.current = "compute"
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()

    def pop(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Copy:
    """A microbatch on the device."""

    def __init__(self, log: Log, number: int) -> None:
        self.number = number
        self.input_ids = SimpleNamespace(record_stream=lambda stream: log.lines.append(f"{number} is {stream.name}'s"))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Stream:
        def __init__(self, device: Any, name: str = "copy") -> None:
            self.name = name

        def wait_event(self, event: str) -> None:
            log.lines.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            return log.lines[-1]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.current = stream.name
        yield
        log.current = "compute"

    def to_device(number: int, device: torch.device) -> Copy:
        log.lines.append(f"{number} by {log.current}")
        copied = Copy(log, number)
        log.copies.add(copied)
        return copied

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "compute"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(feed, "to_device", to_device)
    return log


def of_gpu(count: int, takers: int) -> list[Iterator[Any]]:
    microbatches: Any = range(count)
    return feed.choose(torch.device("cuda", 0)).iterators(microbatches, takers)


def test_the_host_takes_the_microbatches_as_they_are() -> None:
    microbatches: Any = [object(), object()]
    both = feed.choose(torch.device("cpu")).iterators(microbatches, 2)
    assert [list(each) for each in both] == [microbatches, microbatches]


def test_a_gpu_copies_one_ahead_on_a_stream_of_its_own_and_waits_for_each(log: Log) -> None:
    (taken,) = of_gpu(3, takers=1)
    assert log.pop() == []
    assert next(taken).number == 0
    assert log.pop() == ["0 by copy", "1 by copy", "compute waits for 0 by copy", "0 is compute's"]
    assert next(taken).number == 1
    assert log.pop() == ["2 by copy", "compute waits for 1 by copy", "1 is compute's"]
    assert next(taken).number == 2
    assert log.pop() == ["compute waits for 2 by copy", "2 is compute's"]
    assert next(taken, None) is None


def test_a_pass_holds_two_microbatches_whatever_their_number(log: Log) -> None:
    (taken,) = of_gpu(10, takers=1)
    alive = []
    for mb in taken:
        alive.append(len(log.copies))
        del mb
    assert alive == [2] * 9 + [1]


def test_virtual_stages_share_a_copy_until_the_last_has_it(log: Log) -> None:
    """In Megatron's order for pp 2 and vpp 2: two microbatches by the first virtual stage, then by the second."""
    first, second = of_gpu(4, takers=2)
    taken, alive = [], []
    for iterator in (first, first, second, second, first, first, second, second):
        taken.append(next(iterator).number)
        alive.append(len(log.copies))
    assert taken == [0, 1, 0, 1, 2, 3, 2, 3]
    assert alive == [2, 3, 2, 1, 2, 2, 1, 0]
    copied = [line for line in log.pop() if line.endswith("by copy") and "waits" not in line]
    assert copied == [f"{number} by copy" for number in range(4)]
