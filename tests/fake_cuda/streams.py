"""Streams and events of the device: the order that they give its work, and races of its memory.

Work of one stream runs in order. Work of two streams has an order only if an event, or the host, waited in between. The
device itself runs all at once; `Memory` finds what a GPU might have run too early.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


def ignore(kind: str) -> None:
    """Does nothing with a wait of the host."""


note: Callable[[str], None] = ignore  # called at each wait of the host; `watch.Watch` sets it
here = threading.local()  # .stream: the current stream of a thread
Marks = dict["Stream", int]  # streams, and how much of their work comes before


class Stream:
    """A stream: `issued` operations, after those that `behind` says of other streams."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.issued = 0
        self.behind: Marks = {}

    def wait_event(self, event: Event) -> None:
        self.behind = _later(self.behind, event.marks)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """An event; `marks` is the work that it comes after."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.marks: Marks = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current()
        self.marks = _later(stream.behind, {stream: stream.issued})

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        HOST.wait_event(self)
        note("synchronize")


DEFAULT = Stream()
HOST = Stream()  # what the host has waited for comes before all that it issues later


def current(*_: Any) -> Stream:
    """Returns this thread's stream."""
    stream: Stream = getattr(here, "stream", DEFAULT)
    return stream


@contextlib.contextmanager
def using(stream: Stream | None) -> Iterator[None]:
    """Context with another current stream, as `torch.cuda.stream`."""
    before = current()
    here.stream = stream or before
    try:
        yield
    finally:
        here.stream = before


def _later(a: Marks, b: Marks) -> Marks:
    return {stream: max(a.get(stream, 0), b.get(stream, 0)) for stream in {*a, *b}}


def _ordered(stream: Stream, other: Stream, count: int) -> bool:
    """True if `stream` issues its next operation after the first `count` of `other` have ended."""
    return stream is other or max(stream.behind.get(other, 0), HOST.behind.get(other, 0)) >= count


@dataclass
class Block:
    """A storage of the device."""

    home: Stream  # gets its memory back when it is freed
    nbytes: int
    storage: weakref.ref[Any]
    written: tuple[Stream, int]  # the last write
    used: Marks = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)  # streams that `record_stream` named


class Memory:
    """Storages of the device while they live: bytes, the most so far, and uses that no event orders."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.live = self.most = 0
        self.faults: list[str] = []  # of freed memory, found when nobody can raise

    def use(self, storage: Any, writes: bool) -> str:
        """Takes an operation of the current stream on a storage. Returns the race; "" for none."""
        stream, block = current(), self.add(storage)
        race = ""
        if not _ordered(stream, *block.written):
            race = "memory that another stream may still be writing"
        elif writes and any(not _ordered(stream, *use) for use in block.used.items()):
            race = "and writes memory that another stream may still be reading"
        block.used[stream] = stream.issued
        if writes:
            block.written = stream, stream.issued
        return race

    def record(self, storage: Any, stream: Stream) -> None:
        """Takes a call of `record_stream`."""
        self.add(storage).recorded.add(stream)

    def add(self, storage: Any) -> Block:
        """Returns a storage's block; a new one is the current stream's."""
        key = storage._cdata
        if key not in self.blocks:
            written = current(), current().issued
            self.blocks[key] = Block(current(), storage.nbytes(), weakref.ref(storage), written)
            self.live += self.blocks[key].nbytes  # without a call: another thread may take bytes off meanwhile
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._free, key)
        return self.blocks[key]

    def freeing(self) -> bool:
        """True while a storage is gone whose bytes still count: another thread is about to take them off."""
        return any(block.storage() is None for block in list(self.blocks.values()))

    def _free(self, key: int) -> None:
        self.live -= self.blocks[key].nbytes
        block = self.blocks.pop(key)
        for stream, count in block.used.items():
            if stream not in block.recorded and not _ordered(block.home, stream, count):
                self.faults.append("memory was freed while another stream may still use it: no record_stream")
