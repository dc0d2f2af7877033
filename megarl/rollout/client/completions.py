"""Completions under way: sent to the servers in groups, retried, and continued after an interruption."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from megarl.observe.metrics import stats_tracker
from megarl.rollout import sampling_seeds
from megarl.rollout.api import GenerationError
from megarl.rollout.client.connections import Connections
from megarl.rollout.client.requests import CompletionPart, Draft, QueuedRequest, sampling_params
from megarl.rollout.config import RolloutConfig
from megarl.rollout.routing import Router, ServerLost
from megarl.types import ModelRequest, ModelResponse


class Completions:
    """Asks the servers for completions, on the loop of its caller.

    Requests for the same tokens that are made together (a group) travel as one HTTP request, to the server that
    `router` chooses. That saves both sides most of the HTTP and JSON work.
    """

    def __init__(self, config: RolloutConfig, router: Router, connections: Connections):
        self._config = config
        self._router = router
        self._connections = connections
        self._waiting: dict[tuple[int, ...], list[QueuedRequest]] = {}  # requests to send together, by prompt
        self._sending: set[asyncio.Task[None]] = set()

    async def complete(self, req: ModelRequest, count: int, seed: int | None) -> list[ModelResponse]:
        """Returns `count` completions of a request. With `seed`, each has a seed that follows from it and the episode.

        Raises:
            RequestRefused: a server answered 4xx.
            GenerationError: anything else leaves no completion.
        """
        seeds = [None] * count if seed is None else sampling_seeds.stream.get().take(seed, count)
        drafts = [Draft(seed=seed) for seed in seeds]
        unfinished = drafts
        while unfinished:
            parts = await self._ask(req, unfinished)
            for draft, part in zip(unfinished, parts, strict=True):
                draft.add(part, req.gconfig.max_new_tokens)
            unfinished = [draft for draft in unfinished if draft.reason == "abort"]
            if unfinished:
                stats_tracker.total(interruptions=len(unfinished))
                empty_parts = max(draft.empty_parts for draft in unfinished)
                if empty_parts > self._config.max_retries:
                    raise GenerationError(
                        f"request {req.rid} was aborted {empty_parts} times in a row without a new token"
                    )
                if empty_parts:
                    await asyncio.sleep(self._config.retry_delay_s)
        for draft in drafts:
            stats_tracker.scalar(truncated=float(draft.reason == "length"))
        return [draft.response(req) for draft in drafts]

    async def _ask(self, req: ModelRequest, drafts: Sequence[Draft]) -> list[CompletionPart]:
        """Queues completions that continue the prompt and the tokens already written.

        Completions of one prompt that are queued in one turn of the loop are sent together. That is a group when it
        starts, and the rest of it after a weight update aborted it.
        """
        loop = asyncio.get_running_loop()
        queued = QueuedRequest(
            [req.input_ids + draft.tokens for draft in drafts],
            [sampling_params(req.gconfig, len(draft.tokens), draft.seed) for draft in drafts],
            loop.create_future(),
        )
        key = tuple(req.input_ids)
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(self._send_group, key)
        self._waiting[key].append(queued)
        return await queued.parts

    def _send_group(self, key: tuple[int, ...]) -> None:
        group = self._waiting.pop(key)
        task = asyncio.get_running_loop().create_task(self._serve(group))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def give_up(_: asyncio.Future[list[CompletionPart]]) -> None:
            if all(queued.parts.cancelled() for queued in group):
                task.cancel()  # closes the connection: the server then drops the requests

        for queued in group:
            queued.parts.add_done_callback(give_up)

    async def _serve(self, group: Sequence[QueuedRequest]) -> None:
        inputs = [ids for queued in group for ids in queued.inputs]
        params = [each for queued in group for each in queued.params]
        try:
            parts = iter(await self._post(inputs, params))
        except Exception as error:
            for queued in group:
                if not queued.parts.done():
                    queued.parts.set_exception(error)
        else:
            for queued in group:
                own_parts = list(itertools.islice(parts, len(queued.inputs)))
                if not queued.parts.done():
                    queued.parts.set_result(own_parts)

    async def _post(self, inputs: Sequence[list[int]], params: Sequence[dict[str, Any]]) -> list[CompletionPart]:
        """Sends a group. Retries on lost connections and 5xx, each time at an untried server if there is one.

        Waits while the answer is withheld; it is asked again if its server is taken out of service meanwhile.
        """
        tried: list[str] = []
        while True:
            async with self._router.place(inputs[0], len(params), tried, self._config.batch_timeout_s) as address:
                try:
                    answer = await self._router.unless_lost(address, self._released(address, inputs, params))
                except ServerLost:  # not the request's fault: another server answers it
                    stats_tracker.total(retries=1)
                    continue
                if not isinstance(answer, str):
                    for ids, part in zip(inputs, answer, strict=True):
                        self._router.answered(ids + part.tokens, address)
                    return answer
            tried.append(address)
            if len(tried) > self._config.max_retries:
                raise GenerationError(f"{answer}; that was attempt {len(tried)} of {self._config.max_retries + 1}")
            stats_tracker.total(retries=1)
            await asyncio.sleep(self._config.retry_delay_s * 2 ** (len(tried) - 1))
            if address not in self._router.addresses:
                tried.pop()  # the server had died: no attempt of the request

    async def _released(
        self, address: str, inputs: Sequence[list[int]], params: Sequence[dict[str, Any]]
    ) -> list[CompletionPart] | str:
        """The result of one attempt, once `router.hold` no longer withholds it."""
        answer = await self._connections.generate(address, inputs, params)
        if not isinstance(answer, str):
            newest = max((version for part in answer for version in part.versions), default=-1)
            await self._router.released(newest, self._config.batch_timeout_s)
        return answer
