"""A call in a thread, while this rank goes on."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from megarl.parallel import platform

T = TypeVar("T")


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all calls on a device. torch's allocator keeps the freed blocks of each stream for it alone."""
    return torch.cuda.Stream(device)


class BackgroundCall(Generic[T]):
    """Runs `work` in a daemon thread named `name`, in a copy of the caller's context.

    On a GPU it runs on a stream beside the current one, after what the caller has put into that.
    """

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._outcome: Future[T] = Future()
        self._stream = None
        if platform.has_gpu():
            self._stream = _stream(platform.device())
            self._stream.wait_stream(torch.cuda.current_stream(platform.device()))
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._run, work), name=name, daemon=True)
        thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        on_stream = torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
        try:
            with on_stream:  # also sets this thread's device
                result = work()
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(result)

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def result(self) -> T:
        """Waits for the end, and returns what `work` returned or raises what it raised.

        The current stream goes on after the call's. `work` has deadlines of its own.
        """
        result = self._outcome.result()
        if self._stream is not None:
            torch.cuda.current_stream(platform.device()).wait_stream(self._stream)
        return result

    def wait(self, seconds: float) -> None:
        """Waits for the end, at most `seconds`. Raises neither the call's error nor a TimeoutError."""
        with contextlib.suppress(TimeoutError):
            self._outcome.exception(seconds)
