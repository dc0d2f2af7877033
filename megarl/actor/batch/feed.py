"""Brings a pass's microbatches to the device that computes them.

A GPU gets them one ahead: while it computes one, the next is copied on a stream of its own. So it holds few at a time,
and their number does not change its memory. Megatron, NeMo-RL and verl copy each one on the stream that computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from megarl.actor.batch.microbatch import Microbatch
from megarl.device_copies import to_device


class Feed(Protocol):
    """Iterators of Megatron's schedules over a pass's microbatches, which are on the host."""

    def iterators(self, microbatches: Sequence[Microbatch], takers: int) -> list[Iterator[Microbatch]]:
        """Returns an iterator for each of `takers` virtual stages. All yield the same microbatches, on the device."""


class HostFeed:
    """Yields the microbatches themselves, for a device that is the host."""

    def iterators(self, microbatches: Sequence[Microbatch], takers: int) -> list[Iterator[Microbatch]]:
        return [iter(microbatches) for _ in range(takers)]


class GpuFeed:
    """Copies each microbatch to a GPU while it computes the one before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def iterators(self, microbatches: Sequence[Microbatch], takers: int) -> list[Iterator[Microbatch]]:
        copies = _Copies(microbatches, takers, self._device, self._stream)
        return [copies.iterate() for _ in range(takers)]


class _Copies:
    """Copies of one pass, each kept until its last taker has it."""

    def __init__(
        self, microbatches: Sequence[Microbatch], takers: int, device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        self._microbatches, self._device, self._stream = microbatches, device, stream
        self._takers = [takers] * len(microbatches)  # those that are still to come
        self._started: dict[int, tuple[Microbatch, torch.cuda.Event]] = {}

    def iterate(self) -> Iterator[Microbatch]:
        for number in range(len(self._microbatches)):
            yield self._take(number)

    def _take(self, number: int) -> Microbatch:
        """Hands out a microbatch, once the next one's copy has started.

        The copy starts before the kernels of this microbatch do: where CUDA has one hardware queue, it would wait for
        them (`parallel/hardware_queues.py`).
        """
        for ahead in range(number, min(number + 2, len(self._microbatches))):
            self._start(ahead)
        mb, arrived = self._started[number]
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrived)
        mb.input_ids.record_stream(stream)  # one block has all tensors: its memory waits for this stream's kernels
        self._takers[number] -= 1
        if not self._takers[number]:
            del self._started[number]
        return mb

    def _start(self, number: int) -> None:
        """Starts the copy of a microbatch, if it has takers and is not under way."""
        if number in self._started or not self._takers[number]:
            return
        with torch.cuda.stream(self._stream):
            mb = to_device(self._microbatches[number], self._device)
            self._started[number] = mb, self._stream.record_event()


def choose(device: torch.device) -> Feed:
    """Returns the feed of an engine on `device`."""
    return GpuFeed(device) if device.type == "cuda" else HostFeed()
