"""Log-probs of given tokens from SGLang servers: of the tokens, and of the server's most likely ones.

A request asks for no new token (`max_new_tokens=0`) and for the log-probs of its input from `logprob_start_len` on,
which SGLang computes without the sampling temperature.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from megarl.rollout.client.requests import excerpt, named
from megarl.rollout.executor import LoopThread, NoSamplesError
from megarl.rollout.together import together

SEQUENCES_AT_ONCE = 16  # in one request
RETRY_S = 1.0
CONNECT_S = 10.0


class TeacherLostError(NoSamplesError):
    """A teacher server did not answer in time, or not as asked. The last finished step is saved before the end."""


@dataclass(frozen=True)
class Query:
    """A sequence whose tokens from `start` on are scored; at least one token stands before them."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Scores:
    """Scores of a sequence's tokens from `start` on. `top_*` have k entries a token, or none if k is 0."""

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class Scorer:
    """Servers that score sequences. Every failed request is sent again, to the next server, for `wait_s` seconds.

    Args:
        addresses: `host:port` of servers with the same weights.
        api_key: their key; "" for none.
        max_requests: requests under way at once.
        request_s: seconds that an answer may take.
        wait_s: seconds from a request's first failure until the run gives up.
    """

    def __init__(
        self, addresses: Sequence[str], api_key: str, max_requests: int, request_s: float, wait_s: float
    ) -> None:
        self.addresses, self.wait_s = list(addresses), wait_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=request_s, sock_connect=CONNECT_S)
        self._max_requests = max_requests
        self._thread = LoopThread("teacher")

    def close(self) -> None:
        """Cancels requests under way and ends the thread."""
        self._thread.stop()

    def score(self, queries: Sequence[Query], k: int) -> list[Scores]:
        """Scores the sequences, in their order; with the `k` most likely tokens beside each token if k is above 0.

        Raises:
            TeacherLostError: no server answered a request for `wait_s` seconds, or one gave another answer than asked.
        """
        parts = [queries[i : i + SEQUENCES_AT_ONCE] for i in range(0, len(queries), SEQUENCES_AT_ONCE)]
        rounds = math.ceil(len(parts) / self._max_requests)
        longest = self.wait_s + 2 * (self._timeout.total or 0.0) + RETRY_S  # the first answer is lost, and the last
        limit = rounds * longest + CONNECT_S
        answers = self._thread.run(self._score_all(parts, k), limit, "asking the teacher")
        return [scores for part in answers for scores in part]

    async def _score_all(self, parts: Sequence[Sequence[Query]], k: int) -> list[list[Scores]]:
        gate = asyncio.Semaphore(self._max_requests)
        async with aiohttp.ClientSession(timeout=self._timeout, headers=self._headers, trust_env=False) as session:

            async def ask(index: int, part: Sequence[Query]) -> list[Scores]:
                async with gate:
                    return await self._ask(session, index, part, k)

            return await together(ask(index, part) for index, part in enumerate(parts))

    async def _ask(self, session: aiohttp.ClientSession, first: int, part: Sequence[Query], k: int) -> list[Scores]:
        """One request, sent to the servers in turn until one answers."""
        body = orjson.dumps(
            {
                "input_ids": [query.ids for query in part],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": [query.start - 1 for query in part],
                "top_logprobs_num": k,
            }
        )
        lost_at = None
        attempt = first
        while True:
            address = self.addresses[attempt % len(self.addresses)]
            try:
                async with session.post(f"http://{address}/generate", data=body) as response:
                    status, answer = response.status, await response.read()
                if status == 200:
                    return parse_scores(answer, part, k, address)
                failure = f"answers {status}: {excerpt(answer)}"
                if status < 500:
                    raise TeacherLostError(f"the teacher server at {address} {failure}")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = f"is lost ({named(error)})"
            now = time.monotonic()
            lost_at = now if lost_at is None else lost_at
            if now - lost_at >= self.wait_s:
                raise TeacherLostError(
                    f"the teacher server at {address} {failure}, and none answered within teacher.wait_s="
                    f"{self.wait_s:g} s; start it again"
                )
            await asyncio.sleep(min(RETRY_S, self.wait_s))
            attempt += 1


def parse_scores(body: bytes, queries: Sequence[Query], k: int, address: str) -> list[Scores]:
    """Parses an answer of `/generate`. Raises TeacherLostError if it is not about these tokens, or not finite."""
    try:
        answers = orjson.loads(body)
        if len(answers) != len(queries):
            raise ValueError(f"{len(answers)} sequences instead of {len(queries)}")
        return [_parse_one(answer["meta_info"], query, k) for answer, query in zip(answers, queries, strict=True)]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TeacherLostError(
            f"the teacher server at {address} gave a malformed answer ({named(error)}): {excerpt(body)}"
        ) from error


def _parse_one(meta: dict[str, Any], query: Query, k: int) -> Scores:
    scored = meta["input_token_logprobs"][1:]  # the first has no token before it
    if [entry[1] for entry in scored] != query.ids[query.start :]:
        raise ValueError(f"{len(scored)} log-probs, not those of the {len(query.ids) - query.start} tokens asked")
    logprobs = _finite([entry[0] for entry in scored])
    tops = meta["input_top_logprobs"][1:] if k else []
    if len(tops) != (len(scored) if k else 0) or any(len(top) != k for top in tops):
        raise ValueError(f"not {k} likely tokens for each of {len(scored)} tokens")
    ids = [[entry[1] for entry in top] for top in tops]
    if any(type(token) is not int or token < 0 for row in ids for token in row):
        raise ValueError("a likely token has no id")
    return Scores(logprobs, ids, [_finite([entry[0] for entry in top]) for top in tops])


def _finite(values: list[Any]) -> list[float]:
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError("a log-prob is not a finite number")
    return [float(value) for value in values]
