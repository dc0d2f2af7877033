"""A call beside the trainer: its outcome, its context, and on GPUs the order of streams."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megarl.parallel import platform
from megarl.trainer import background_call
from megarl.trainer.background_call import BackgroundCall

DEADLINE_S = 600.0
CONTEXT = contextvars.ContextVar("test_background_call", default="")


def test_the_outcome_comes_later_and_the_context_is_the_callers() -> None:
    gate = threading.Event()
    CONTEXT.set("of the caller")

    def work() -> tuple[str, str]:
        assert gate.wait(DEADLINE_S)
        return CONTEXT.get(), threading.current_thread().name

    call = BackgroundCall("weights", work)
    assert not call.done
    call.wait(0.01)
    gate.set()
    assert call.result() == ("of the caller", "weights")
    assert call.done


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    def work() -> None:
        raise ValueError("tensor model.norm.weight")

    call = BackgroundCall("weights", work)
    call.wait(DEADLINE_S)
    assert call.done
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        call.result()


def test_on_a_gpu_it_reads_after_the_callers_work_and_the_caller_goes_on_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that write down who waits for whom. This does not cover that kernels obey them."""
    order: list[str] = []
    made: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "own"
            made.append(self.name)

        def wait_stream(self, other: Stream) -> None:
            order.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        order.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(background_call, "_stream", functools.cache(background_call._stream.__wrapped__))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    assert BackgroundCall("weights", lambda: order.append("work")).result() is None
    assert order == ["own waits for current", "on own", "work", "current waits for own"]
    BackgroundCall("weights", lambda: None).result()
    assert made.count("own") == 1  # torch's allocator would keep free blocks for each stream
