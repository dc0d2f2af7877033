"""Which server a request goes to: one that serves, the one that has read its beginning already, else the least loaded.

All state belongs to the client's asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from megarl.rollout.api import GenerationError

T = TypeVar("T")

BLOCK = 16  # tokens: beginnings are remembered at multiples of it, and whole
REMEMBERED = 1 << 16  # beginnings
MOST_UNEVEN = 32  # completions that a server may have more than the least loaded one, to be preferred for what it read:
# one for each block of a beginning, all of them for a whole prompt (a group stays together)
POLL_S = 0.1


class ServerLost(Exception):
    """The server that a request was sent to has been taken out of service."""


class WeightsWanted(Exception):
    """No server is in service, and one that was restarted waits for the weights: the trainer must bring them."""


class Fleet(Protocol):
    """Who says which servers may be asked (`rollout.supervisor.Supervisor`). Any thread may ask it."""

    def serving(self) -> list[str]:
        """Addresses of the servers that serve the current weights."""

    def outlook(self) -> str:
        """What is to be expected where none serves: `starting`, `ready` (one waits for weights) or `none`."""


class Router:
    """Shares requests out over servers, at most `most` completions at once on each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.fleet: Fleet | None = None
        self._load: dict[str, int] = {}  # completions under way, of servers in service
        self._asked: dict[str, int] = {}  # completions ever
        self._lost: dict[str, asyncio.Future[None]] = {}  # done when the server is taken out of service
        self._awaited: dict[asyncio.Future[None], None] = {}  # of requests that wait for room, in their order
        self._known: OrderedDict[int, str] = OrderedDict()  # who has read a beginning, by its hash

    @property
    def addresses(self) -> list[str]:
        """The servers in service."""
        return list(self._load)

    def set(self, addresses: Sequence[str]) -> None:
        """These servers are in service, and no others: requests that the others were sent are interrupted."""
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
        """Takes over what the fleet says now."""
        if self.fleet is not None:
            self.set(self.fleet.serving())

    # -- one request --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def place(
        self, ids: Sequence[int], count: int, tried: Collection[str], timeout_s: float
    ) -> AsyncIterator[str]:
        """The address to send `count` completions of `ids` to, one not `tried` if there is any; waits for room.

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
        self._asked[address] += count
        lost = self._lost[address]
        self._remember(ids, address)
        try:
            yield address
        finally:
            if not lost.done():  # else it may be back in service, with a count of its own
                self._load[address] -= count
                self._changed()

    async def _change(self, timeout_s: float) -> None:
        """Returns when there may be room, or after `timeout_s`. Who came first is woken first."""
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
        """What `answer` returns. Cancels it and raises ServerLost if the server is taken out of service."""
        lost = self._lost.get(address)
        task = asyncio.ensure_future(answer)
        try:
            if lost is not None:
                both: set[asyncio.Future[Any]] = {task, lost}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise ServerLost(address)
            return await task
        finally:
            task.cancel()

    def answered(self, ids: Sequence[int], address: str) -> None:
        """The server has read and written `ids`: a conversation that goes on from them goes there."""
        self._remember(ids, address)

    def _choose(self, ids: Sequence[int], count: int, tried: Collection[str]) -> str | None:
        """The server for a request, None where all are full."""
        untried = [address for address in self._load if address not in tried]
        able = [a for a in untried or self._load if self._load[a] + count <= self.most or self._load[a] == 0]
        if not able:
            return None
        least = min(able, key=lambda address: (self._load[address], self._asked[address]))
        reader, worth = self._reader(ids)
        if reader in able and self._load[reader] <= self._load[least] + worth:
            return reader
        return least

    # -- beginnings ---------------------------------------------------------------------------------------------

    def _reader(self, ids: Sequence[int]) -> tuple[str, int]:
        """The server that has read the most of `ids`, at least half of them, and how uneven loads may be for it; ""
        if none has. Prompts of one template begin alike, which must not bring all of them to one server."""
        for length, key in reversed(_beginnings(ids)):
            if 2 * length < len(ids):
                break
            if (address := self._known.get(key)) is not None:
                return address, MOST_UNEVEN if length == len(ids) else min(MOST_UNEVEN, length // BLOCK)
        return "", 0

    def _remember(self, ids: Sequence[int], address: str) -> None:
        if len(self._load) < 2:  # there is nothing to choose
            return
        for _, key in _beginnings(ids):
            self._known[key] = address
            self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    # -- when none is left --------------------------------------------------------------------------------------

    def _check_outlook(self) -> None:
        if self.fleet is None or self.fleet.outlook() == "none":
            raise GenerationError("no rollout server is left to ask", fatal=True)

    async def unless_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Cancels it and raises WeightsWanted where it waits for a server without weights."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                if not self._load and self.fleet is not None and self.fleet.outlook() == "ready":
                    raise WeightsWanted("a restarted server waits for the weights")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _beginnings(ids: Sequence[int]) -> list[tuple[int, int]]:
    """`(length, hash)` of the beginnings of `ids` at whole blocks, and of all of it, the shortest first."""
    found: list[tuple[int, int]] = []
    so_far = 0
    for start in range(0, len(ids), BLOCK):
        so_far = hash((so_far, *ids[start : start + BLOCK]))
        found.append((min(start + BLOCK, len(ids)), so_far))
    return found
