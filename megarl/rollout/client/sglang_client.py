"""The client of the SGLang servers: requests over HTTP, answers as tokens with log-probs and weight versions."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from megarl.knobs import UserError, knob
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import GenerationError, InferenceEngine, RequestRefused, RolloutWorkflow
from megarl.rollout.client.requests import (
    Asked,
    CompletionPart,
    Draft,
    excerpt,
    named,
    parse_answer,
    sampling_params,
    version_of,
)
from megarl.rollout.executor import LoopThread, assemble, record_stats, rollout_batch
from megarl.rollout.routing import Fleet, Router, ServerLost
from megarl.rollout.stream import RolloutStream, ShouldAccept, StreamLimits
from megarl.types import Episode, ModelRequest, ModelResponse, PackedBatch, WeightUpdateMeta, WeightUpdates

ADDRESSES_VARIABLE = "MEGARL_LLM_SERVER_ADDRS"
KEY_VARIABLE = "MEGARL_LLM_SERVER_API_KEY"
KEEPALIVE_S = 2.0  # below the 5 s after which SGLang's uvicorn closes an idle connection: ours must give up first
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RolloutConfig:
    """How the trainer speaks to the rollout servers."""

    max_connections: int = knob(256, "HTTP requests under way at once over all servers; further ones wait")
    max_per_server: int = knob(1024, "completions asked of a server at once; further requests wait, or go to another")
    connect_timeout_s: float = knob(10.0, "seconds until a server must have accepted a connection")
    request_timeout_s: float = knob(300.0, "seconds until a server must have answered a request")
    batch_timeout_s: float = knob(1800.0, "seconds until all episodes of a batch must have ended")
    max_retries: int = knob(3, "times a request is sent again after a lost connection or a 5xx answer")
    retry_delay_s: float = knob(0.5, "seconds before the first retry; doubled for each further one")
    max_head_offpolicyness: int = knob(
        0, "versions that a trained token may be old; 0: rollouts and training alternate"
    )
    episode_timeout_s: float = knob(600.0, "seconds until an episode must have ended; later it is rejected")
    max_requeues: int = knob(8, "times a prompt is begun again after its servers failed")
    max_failures: int = knob(16, "episodes that may fail in a row, each rejected, before the run stops")
    rollout_func: str = knob("", "MODULE.FUNCTION of your own that makes the completions, as TRL's rollout_func does")

    def __post_init__(self) -> None:
        above_zero = (
            "max_connections",
            "max_per_server",
            "connect_timeout_s",
            "request_timeout_s",
            "batch_timeout_s",
            "episode_timeout_s",
        )
        for name in above_zero:
            if not getattr(self, name) > 0:
                raise UserError(f"rollout.{name}={getattr(self, name)} must be more than 0")
        for name in ("max_retries", "retry_delay_s", "max_head_offpolicyness", "max_requeues", "max_failures"):
            if getattr(self, name) < 0:
                raise UserError(f"rollout.{name}={getattr(self, name)} must not be negative")


class RemoteSGLangEngine(InferenceEngine):
    """SGLang servers reached over HTTP, used from synchronous code; its asyncio loop runs in a thread of its own.

    Requests for the same tokens that are made together (a group) travel as one HTTP request, which spares both sides
    most of the HTTP and JSON work, to the server that `routing.Router` chooses.
    """

    def __init__(self, config: RolloutConfig):
        self.config = config
        self.router = Router(config.max_per_server)
        self.episodes: list[Episode] = []  # of the last batch, in the order of its prompts
        self._version = 0
        self._updates: WeightUpdates | None = None
        self._stream: RolloutStream | None = None
        self._saved: dict[str, Any] | None = None  # a stream's state, until there is one
        self._thread: LoopThread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._waiting: dict[tuple[int, ...], list[Asked]] = {}  # by prompt
        self._sending: set[asyncio.Task[None]] = set()

    def initialize(
        self, addresses: Sequence[str] | None = None, ft_spec: Any = None, *, api_key: str | None = None
    ) -> None:
        """Connects to the servers `host:port`; without `addresses`, to those of MEGARL_LLM_SERVER_ADDRS.

        `ft_spec` is for the train engines, whose `initialize` takes the same arguments; nothing here depends on it.
        `api_key` is the servers' key, else MEGARL_LLM_SERVER_API_KEY. Raises UserError where a server does not answer.
        """
        if self._thread is not None:
            raise UserError("the rollout engine is initialized already; call destroy() first")
        found = addresses_in_environment() if addresses is None else [plain_address(a) for a in addresses]
        if not found:
            raise UserError(
                f"no SGLang server is known: pass addresses, or set {ADDRESSES_VARIABLE}=host:port[,host:port...]"
            )
        self._thread = LoopThread("rollout")
        try:
            self._thread.run(
                self._open(found, api_key or os.environ.get(KEY_VARIABLE)),
                (self.config.connect_timeout_s + self.config.request_timeout_s) * 2,
                "connecting to the SGLang servers",
            )
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Cancels requests under way, closes connections and ends the thread. May be called twice."""
        thread, session = self._thread, self._session
        self._thread = self._session = self._stream = None
        if thread is None:
            return
        try:
            if session is not None:
                thread.run(session.close(), CLOSE_TIMEOUT_S, "closing the connections to the SGLang servers")
        finally:
            thread.stop()

    @property
    def addresses(self) -> list[str]:
        """The servers that requests go to."""
        return self.router.addresses

    def follow(self, fleet: Fleet) -> None:
        """From now on `fleet` says which servers are asked; `refresh` tells this engine that it changed."""
        self.router.fleet = fleet
        self.refresh()

    def refresh(self) -> None:
        """Takes over which servers are in service; what others were sent is asked again. From any thread."""
        thread = self._thread
        if thread is not None:
            thread.loop.call_soon_threadsafe(self.router.refresh)

    def set_version(self, version: int) -> None:
        self._version = version
        if self._stream is not None:
            with stats_tracker.scope("rollout"):  # of the episodes that it starts
                self._stream.set_version(version)

    def get_version(self) -> int:
        return self._version

    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> PackedBatch:
        """Runs one episode per item of `data` at once and returns their groups in the order of `data`.

        Adds `group_ids`, the positions in `data`. Rejected prompts are left out; `episodes` says which and why. Raises
        what the first failing episode raised (`WorkflowError`, `UserError`), TimeoutError after `batch_timeout_s`,
        WeightsWanted where no server can answer before it has been brought the weights.
        """
        if self._thread is None:
            raise UserError("the rollout engine is not initialized; call initialize() first")
        batch, self.episodes = rollout_batch(
            self, self._thread, data, workflow, self.config.batch_timeout_s, self.router.unless_wanted
        )
        return batch

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: RolloutWorkflow | Callable[..., RolloutWorkflow],
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAccept | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> PackedBatch:
        """The next batch of `dataloader`, sampled while the trainer trains (see `rollout/stream.py`).

        Args:
            dataloader: yields lists of prompts, has `batch_size`, and best a `state_dict`; the same at every call.
            workflow: one, or what makes one of `workflow_kwargs`.
            should_accept_fn: sees a prompt's packed group; where it says no, another prompt is sampled in its place.
            group_size: runs of the workflow for each prompt, joined to one group.
            dynamic_bs: rejected prompts are not replaced; a batch then has fewer.

        Adds `group_ids`, the prompts' numbers in the order of the loader; `episodes` says which prompts were rejected
        and why. Raises WorkflowError, GenerationError, TimeoutError after `batch_timeout_s`, or WeightsWanted where no
        server can answer before it has been brought the weights; episodes under way then wait for them.
        """
        stream = self._stream_of(dataloader, workflow, workflow_kwargs or {}, should_accept_fn, group_size, dynamic_bs)
        with stats_tracker.scope("rollout"):
            self.episodes = stream.next_batch(self.config.batch_timeout_s, self.router.unless_wanted)
            batch = assemble(self.episodes)
            record_stats(self.episodes, batch, self._version, stream.tokens_per_s)
        return batch

    def _stream_of(
        self,
        dataloader: Any,
        workflow: RolloutWorkflow | Callable[..., RolloutWorkflow],
        workflow_kwargs: Mapping[str, Any],
        should_accept_fn: ShouldAccept | None,
        group_size: int,
        dynamic_bs: bool,
    ) -> RolloutStream:
        if self._thread is None:
            raise UserError("the rollout engine is not initialized; call initialize() first")
        if self._stream is None:
            config = self.config
            self._stream = RolloutStream(
                self,
                self._thread,
                dataloader,
                workflow if isinstance(workflow, RolloutWorkflow) else workflow(**workflow_kwargs),
                StreamLimits(
                    config.max_head_offpolicyness, config.episode_timeout_s, config.max_requeues, config.max_failures
                ),
                batch_size=dataloader.batch_size,
                should_accept=should_accept_fn,
                group_size=group_size,
                dynamic_bs=dynamic_bs,
            )
            if self._saved is not None:
                self._stream.load_state_dict(self._saved)
        elif self._stream.loader is not dataloader:
            raise UserError("prepare_batch: another dataloader than at the first call; an engine streams from one")
        return self._stream

    def state_dict(self) -> dict[str, Any]:
        """The prompts between the loader and the trainer, and where the loader stands, for a checkpoint."""
        return self._stream.state_dict() if self._stream is not None else dict(self._saved or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken, from the first `prepare_batch` on."""
        self._saved = dict(state) or None

    def connect(self, updates: WeightUpdates) -> None:
        """Says what brings weights to the servers (a `reshard.session.WeightSession`): `update_weights` needs it."""
        self._updates = updates

    def update_weights(self, meta: WeightUpdateMeta) -> Future[Any]:
        """A future that ends when the servers serve `meta.model_version`; on rank 0, before `actor.upload_weights`.

        Its `result()` raises what went wrong. Then `set_version` says so to this engine.
        """
        if self._updates is None:
            raise UserError("update_weights: connect(session) first; a weight session brings the weights")
        return self._updates.expect(meta)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One completion, of one piece unless a weight update aborted it: then it goes on after the tokens so far.

        `rid` is the caller's own: the servers never see it, so requests may share one. Raises `RequestRefused` on a
        4xx answer, `GenerationError` on anything else that leaves no completion.
        """
        (response,) = await self._complete(req, 1)
        return response

    async def agenerate_group(self, req: ModelRequest) -> list[ModelResponse]:
        """`req.gconfig.n_samples` completions, each as `agenerate` has it."""
        return await self._complete(req, req.gconfig.n_samples)

    async def _complete(self, req: ModelRequest, count: int) -> list[ModelResponse]:
        drafts = [Draft() for _ in range(count)]
        unfinished = drafts
        while unfinished:
            pieces = await self._ask(req, [draft.tokens for draft in unfinished])
            for draft, piece in zip(unfinished, pieces, strict=True):
                draft.add(piece, req.gconfig.max_new_tokens)
            unfinished = [draft for draft in unfinished if draft.reason == "abort"]
            if unfinished:
                stats_tracker.total(interruptions=len(unfinished))
                fruitless = max(draft.fruitless for draft in unfinished)
                if fruitless > self.config.max_retries:
                    raise GenerationError(
                        f"request {req.rid} was aborted {fruitless} times in a row without a new token"
                    )
                if fruitless:
                    await asyncio.sleep(self.config.retry_delay_s)
        for draft in drafts:
            stats_tracker.scalar(truncated=float(draft.reason == "length"))
        return [draft.response(req) for draft in drafts]

    async def _open(self, addresses: Sequence[str], api_key: str | None) -> None:
        config = self.config
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=config.max_connections, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=config.connect_timeout_s, sock_read=config.request_timeout_s
            ),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )
        await asyncio.gather(*(self._check(self._session, address) for address in addresses))
        self.router.set(addresses)

    async def _check(self, session: aiohttp.ClientSession, address: str) -> None:
        """Raises UserError unless an SGLang server answers at `address` and labels its weights with a number."""
        try:
            async with session.get(f"http://{address}/model_info") as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UserError(
                f"no SGLang server answers at {address} ({named(error)}); start it, or mend {ADDRESSES_VARIABLE}"
            ) from error
        if status == 401:
            raise UserError(f"the SGLang server at {address} refuses the API key; set {KEY_VARIABLE}")
        try:
            label = json.loads(body)["weight_version"] if status == 200 else None
            version_of(label)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{address} answers /model_info with {status} {excerpt(body)}: it must be an SGLang server, "
                "started with --weight-version 0"
            ) from error

    async def _ask(self, req: ModelRequest, written: list[list[int]]) -> list[CompletionPart]:
        """Queues completions that go on after the prompt and what is `written`. Those of one prompt, queued in one turn
        of the loop, are sent together: a group when it starts, and what is left of it when a weight update aborted it.
        """
        loop = asyncio.get_running_loop()
        asked = Asked(
            [req.input_ids + tokens for tokens in written],
            [sampling_params(req.gconfig, len(tokens)) for tokens in written],
            loop.create_future(),
        )
        key = tuple(req.input_ids)
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(self._send_group, key)
        self._waiting[key].append(asked)
        return await asked.pieces

    def _send_group(self, key: tuple[int, ...]) -> None:
        group = self._waiting.pop(key)
        task = asyncio.get_running_loop().create_task(self._serve(group))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def give_up(_: asyncio.Future[list[CompletionPart]]) -> None:
            if all(asked.pieces.cancelled() for asked in group):
                task.cancel()  # closes the connection, upon which the server drops the requests

        for asked in group:
            asked.pieces.add_done_callback(give_up)

    async def _serve(self, group: Sequence[Asked]) -> None:
        inputs = [ids for asked in group for ids in asked.inputs]
        params = [each for asked in group for each in asked.params]
        try:
            pieces = iter(await self._post(inputs, params))
        except Exception as error:
            for asked in group:
                if not asked.pieces.done():
                    asked.pieces.set_exception(error)
        else:
            for asked in group:
                found = list(itertools.islice(pieces, len(asked.inputs)))
                if not asked.pieces.done():
                    asked.pieces.set_result(found)

    async def _post(self, inputs: Sequence[list[int]], params: Sequence[dict[str, Any]]) -> list[CompletionPart]:
        """Sends a group, again on lost connections and 5xx, each time to a server not tried yet if there is one."""
        body = orjson.dumps({"input_ids": inputs, "sampling_params": params, "return_logprob": True})
        tried: list[str] = []
        while True:
            async with self.router.place(inputs[0], len(params), tried, self.config.batch_timeout_s) as address:
                try:
                    status, answer = await self.router.unless_lost(address, self._post_once(address, body))
                except ServerLost:  # not the request's fault: whoever is left answers it
                    stats_tracker.total(retries=1)
                    continue
                except aiohttp.SocketTimeoutError as error:
                    limit = f"rollout.request_timeout_s={self.config.request_timeout_s:g} s"
                    raise GenerationError(f"{address} did not answer within {limit}") from error
                except (aiohttp.ClientError, OSError) as error:
                    failure = f"the connection to {address} failed ({named(error)})"
                else:
                    if status == 200:
                        pieces = parse_answer(answer, len(params), address)
                        for ids, piece in zip(inputs, pieces, strict=True):
                            self.router.answered(ids + piece.tokens, address)
                        return pieces
                    failure = f"{address} answered {status}: {excerpt(answer)}"
                    if status < 500:
                        raise RequestRefused(failure)
            tried.append(address)
            if len(tried) > self.config.max_retries:
                raise GenerationError(f"{failure}; that was attempt {len(tried)} of {self.config.max_retries + 1}")
            stats_tracker.total(retries=1)
            await asyncio.sleep(self.config.retry_delay_s * 2 ** (len(tried) - 1))
            if address not in self.router.addresses:
                tried.pop()  # the server had died: that says nothing about the request

    async def _post_once(self, address: str, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            raise GenerationError("the rollout engine is not initialized; call initialize() first")
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"http://{address}/generate", data=body, headers=headers) as response:
            return response.status, await response.read()


def plain_address(address: str) -> str:
    """`host:port` of an address that may be given as a URL."""
    return address.strip().removeprefix("http://").rstrip("/")


def addresses_in_environment() -> list[str]:
    """The servers that MEGARL_LLM_SERVER_ADDRS names; [] where it is not set."""
    return [plain_address(a) for a in os.environ.get(ADDRESSES_VARIABLE, "").split(",") if a.strip()]
