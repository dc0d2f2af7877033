"""Seeds of a deterministic run's requests: they follow from the episode, and not from the time of the request.

Servers in a deterministic mode draw a token from the request's seed and the token's position. Requests without a seed
have one in common there, so that all samples of a group would be equal.
"""

from __future__ import annotations

import hashlib
import itertools
from contextvars import ContextVar


class SeedStream:
    """Seeds that follow from the parts of a name, one after another."""

    def __init__(self, *parts: int) -> None:
        self._parts = parts
        self._numbers = itertools.count()

    def take(self, seed: int, count: int) -> list[int]:
        """The next seeds, of 63 bits, under the run's `seed`."""
        names = [repr((seed, self._parts, number)) for number in itertools.islice(self._numbers, count)]
        digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
        return [int.from_bytes(digest, "big") >> 1 for digest in digests]


# Stream of the episode that runs in this context. Requests outside of episodes, such as an HTTP endpoint's, share one:
# their seeds differ, in the order of their arrival.
stream: ContextVar[SeedStream] = ContextVar("stream", default=SeedStream())  # noqa: B039 (see above)
