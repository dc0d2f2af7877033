"""Routes requests to servers: to the one that has already read the prompt's prefix, else to the least loaded.

All state belongs to the client's asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from megarl.observe.timeline import timeline
from megarl.rollout.api import GenerationError

T = TypeVar("T")

BLOCK = 16  # tokens; prefixes are remembered at multiples of it, and whole
MAX_PREFIXES = 1 << 16  # prefixes kept in `_readers`
# Completions that a server may have above the least loaded one and still be preferred for a prefix that it has read:
# one for each block of the prefix, all of them for a whole prompt (a group stays together).
MAX_IMBALANCE = 32
POLL_S = 0.1


class ServerLost(Exception):
    """The server that a request was sent to has been taken out of service."""


class WeightsWanted(Exception):
    """Servers wait for the trainer: a restarted one for a push of the weights, or all for the end of a push."""


class Fleet(Protocol):
    """Knows which servers may be asked; implemented by `servers.supervisor.Supervisor`. Any thread may ask it."""

    def serving(self) -> list[str]:
        """Addresses of the servers that hold the current weights."""

    def outlook(self) -> str:
        """Prospect while no server serves: `starting`, `ready` (one waits for weights) or `none`."""


class Router:
    """Distributes requests over servers, at most `max_per_server` completions at once on each."""

    def __init__(self, max_per_server: int) -> None:
        self.max_per_server = max_per_server
        self.fleet: Fleet | None = None
        self._load: dict[str, int] = {}  # completions under way, of servers in service
        self._asked: dict[str, int] = {}  # completions asked for so far, by server
        self._lost: dict[str, asyncio.Future[None]] = {}  # done when the server is taken out of service
        self._awaited: dict[asyncio.Future[None], None] = {}  # one for each request that waits for room, in order
        self._readers: OrderedDict[int, str] = OrderedDict()  # hash of a prefix -> server that has read it
        self._release: asyncio.Future[None] | None = None  # while answers of `_held_version` are withheld
        self._held_version = 0
        self.sync_ended: Callable[[], bool] | None = None  # asked while a batch is awaited beside a sync

    @property
    def addresses(self) -> list[str]:
        """The servers in service."""
        return list(self._load)

    def set(self, addresses: Sequence[str]) -> None:
        """Sets the servers in service. Requests under way at other servers are interrupted."""
        for address in [address for address in self._load if address not in addresses]:
            del self._load[address]
            self._lost.pop(address).set_result(None)
        for address in addresses:
            if address not in self._load:
                self._load[address] = 0
                self._asked.setdefault(address, 0)
                self._lost[address] = asyncio.get_running_loop().create_future()
        self._changed()

    def refresh(self) -> None:
        """Takes over the fleet's current list of servers."""
        if self.fleet is not None:
            self.set(self.fleet.serving())

    # -- one request --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def place(
        self, ids: Sequence[int], count: int, tried: Collection[str], timeout_s: float
    ) -> AsyncIterator[str]:
        """Yields the address to send `count` completions of `ids` to, untried if possible; waits for room.

        Raises:
            GenerationError: no server is left (`fatal`), or there was no room within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (address := self._choose(ids, count, tried)) is None:
            if not self._load:
                self._check_outlook()
            if time.monotonic() > deadline:
                raise GenerationError(f"no server had room for a request within {timeout_s:g} s")
            await self._change(POLL_S)
        self._load[address] += count
        timeline.load(address, self._load[address])
        self._asked[address] += count
        lost = self._lost[address]
        self._remember(ids, address)
        try:
            yield address
        finally:
            if not lost.done():  # else the server may be back in service with a new count
                self._load[address] -= count
                timeline.load(address, self._load[address])
                self._changed()

    async def _change(self, timeout_s: float) -> None:
        """Returns when there may be room, or after `timeout_s`. The oldest waiter is woken first."""
        change = asyncio.get_running_loop().create_future()
        self._awaited[change] = None
        try:
            await asyncio.wait({change}, timeout=timeout_s)
        finally:
            del self._awaited[change]

    def _changed(self) -> None:
        for change in self._awaited:
            if not change.done():
                change.set_result(None)

    async def unless_lost(self, address: str, answer: Coroutine[Any, Any, T]) -> T:
        """Awaits `answer`. Discards it and raises ServerLost if the server is taken out of service meanwhile."""
        lost = self._lost.get(address)
        task = asyncio.ensure_future(answer)
        try:
            if lost is not None:
                futures: set[asyncio.Future[Any]] = {task, lost}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                if lost.done():  # also if both are: an answer released in this turn may be of wrong weights
                    raise ServerLost(address)
            return await task
        finally:
            task.cancel()

    def hold(self, version: int) -> None:
        """Begins to withhold answers with tokens of `version`: its servers are not yet proven to compute right."""
        self._held_version = version
        if self._release is None:
            self._release = asyncio.get_running_loop().create_future()

    def release(self) -> None:
        """Ends `hold`. Take servers that failed the proof out of service first."""
        if self._release is not None:
            self._release.set_result(None)
            self._release = None

    async def released(self, newest: int, timeout_s: float) -> None:
        """Waits while an answer, whose newest token is of version `newest`, is withheld.

        Raises:
            GenerationError: it is still withheld after `timeout_s`.
        """
        release = self._release
        if release is None or newest < self._held_version:
            return
        await asyncio.wait({release}, timeout=timeout_s)
        if not release.done():
            raise GenerationError(f"no server was proven to serve version {newest} right within {timeout_s:g} s")

    def answered(self, ids: Sequence[int], address: str) -> None:
        """Records that the server has read and written `ids`: a conversation that continues them goes there."""
        self._remember(ids, address)

    def _choose(self, ids: Sequence[int], count: int, tried: Collection[str]) -> str | None:
        """The server for a request; None if all are full."""
        untried = [address for address in self._load if address not in tried]
        able = [a for a in untried or self._load if self._load[a] + count <= self.max_per_server or self._load[a] == 0]
        if not able:
            return None
        least = min(able, key=lambda address: (self._load[address], self._asked[address]))
        reader, imbalance = self._reader(ids)
        if reader in able and self._load[reader] <= self._load[least] + imbalance:
            return reader
        return least

    # -- prefixes -----------------------------------------------------------------------------------------------

    def _reader(self, ids: Sequence[int]) -> tuple[str, int]:
        """The server that has read the longest prefix of `ids`, and the load imbalance that this is worth.

        The prefix must be at least half of `ids`, else the server is "": prompts of one template begin alike, and must
        not all go to one server.
        """
        for length, key in reversed(_prefixes(ids)):
            if 2 * length < len(ids):
                break
            if (address := self._readers.get(key)) is not None:
                return address, MAX_IMBALANCE if length == len(ids) else min(MAX_IMBALANCE, length // BLOCK)
        return "", 0

    def _remember(self, ids: Sequence[int], address: str) -> None:
        if len(self._load) < 2:  # no choice to make
            return
        for _, key in _prefixes(ids):
            self._readers[key] = address
            self._readers.move_to_end(key)
        while len(self._readers) > MAX_PREFIXES:
            self._readers.popitem(last=False)

    # -- when no server is left ---------------------------------------------------------------------------------

    def _check_outlook(self) -> None:
        if self.fleet is None or self.fleet.outlook() == "none":
            raise GenerationError("no rollout server is left to ask", fatal=True)

    async def unless_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`. Cancels it and raises WeightsWanted if it waits for a server without weights.

        Also if it is not done when the sync beside it has ended: servers may withhold answers until the trainer knows.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                if not self._load and self.fleet is not None and self.fleet.outlook() == "ready":
                    raise WeightsWanted("a restarted server waits for the weights")
                if self.sync_ended is not None and self.sync_ended():
                    raise WeightsWanted("the weights have reached the servers")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _prefixes(ids: Sequence[int]) -> list[tuple[int, int]]:
    """`(length, hash)` of the prefixes of `ids` at whole blocks, and of all of it, the shortest first."""
    prefixes: list[tuple[int, int]] = []
    so_far = 0
    for start in range(0, len(ids), BLOCK):
        so_far = hash((so_far, *ids[start : start + BLOCK]))
        prefixes.append((min(start + BLOCK, len(ids)), so_far))
    return prefixes
