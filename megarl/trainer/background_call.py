"""A call in a thread, while this rank goes on."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from megarl.parallel import platform

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runs `work` in a daemon thread named `name`, in a copy of the caller's context.

    On a GPU it has a stream of its own, which begins after what the caller has put into the current one.
    """

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._outcome: Future[T] = Future()
        self._stream = None
        if platform.has_gpu():
            self._stream = torch.cuda.Stream(platform.device())
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
