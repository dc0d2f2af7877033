"""Seeds of a deterministic run's requests: they follow from the episode, and not from the time of the request.

Servers in a deterministic mode draw a token from the request's seed and the token's position. Requests without a seed
have one in common there, so that all samples of a group would be equal.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Iterable
from contextvars import ContextVar
from typing import TypeVar

from megarl.rollout.together import together

T = TypeVar("T")
BATCH = -1  # of the streams of a batch that is asked for as a whole, such as an evaluation's


class SeedStream:
    """Seeds that follow from the parts of a name, one after another."""

    def __init__(self, *parts: int) -> None:
        self._parts = parts
        self._numbers = itertools.count()

    def child(self, *parts: int) -> SeedStream:
        """A stream of its own, whose name has more parts."""
        return SeedStream(*self._parts, *parts)

    def take(self, seed: int, count: int) -> list[int]:
        """The next seeds, of 63 bits, under the run's `seed`."""
        names = [repr((seed, self._parts, number)) for number in itertools.islice(self._numbers, count)]
        digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
        return [int.from_bytes(digest, "big") >> 1 for digest in digests]


# Stream of the episode that runs in this context. Requests outside of episodes, such as an HTTP endpoint's, share one:
# their seeds differ, in the order of their arrival.
stream: ContextVar[SeedStream] = ContextVar("stream", default=SeedStream())  # noqa: B039 (see above)


async def gather_apart(runs: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all at once, each with seeds of its own: the order in which they ask makes no difference."""
    own = stream.get()

    async def run(number: int, awaitable: Awaitable[T]) -> T:
        stream.set(own.child(number))
        return await awaitable

    return await together(run(number, awaitable) for number, awaitable in enumerate(runs))
