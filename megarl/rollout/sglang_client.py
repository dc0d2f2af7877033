"""The client of the SGLang servers: requests over HTTP, answers as tokens with log-probs and weight versions."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.knobs import UserError, knob
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import GenerationError, InferenceEngine, RequestRefused, RolloutWorkflow
from megarl.rollout.executor import LoopThread, assemble, record_stats, rollout_batch
from megarl.rollout.stream import RolloutStream, ShouldAccept, StreamLimits
from megarl.types import (
    Episode,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    PackedBatch,
    WeightUpdateMeta,
    WeightUpdates,
)

ADDRESSES_VARIABLE = "MEGARL_LLM_SERVER_ADDRS"
KEY_VARIABLE = "MEGARL_LLM_SERVER_API_KEY"
KEEPALIVE_S = 2.0  # below the 5 s after which SGLang's uvicorn closes an idle connection: ours must give up first
CLOSE_TIMEOUT_S = 10.0
EXCERPT = 500


@dataclass(frozen=True)
class RolloutConfig:
    """How the trainer speaks to the rollout servers."""

    max_connections: int = knob(256, "HTTP requests under way at once over all servers; further ones wait")
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

    def __post_init__(self) -> None:
        above_zero = (
            "max_connections",
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


@dataclass(frozen=True)
class Piece:
    """What one answer adds to a completion: per token its id, log-prob and weight version, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: str


class RemoteSGLangEngine(InferenceEngine):
    """SGLang servers reached over HTTP, used from synchronous code; its asyncio loop runs in a thread of its own.

    Requests for the same tokens that are made together (a group) travel as one HTTP request, which spares both sides
    most of the HTTP and JSON work, to the server with the fewest completions under way.
    """

    def __init__(self, config: RolloutConfig):
        self.config = config
        self.addresses: list[str] = []
        self.episodes: list[Episode] = []  # of the last batch, in the order of its prompts
        self._version = 0
        self._updates: WeightUpdates | None = None
        self._stream: RolloutStream | None = None
        self._saved: dict[str, Any] | None = None  # a stream's state, until there is one
        self._thread: LoopThread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._under_way: dict[str, int] = {}  # completions asked of each server
        self._waiting: dict[tuple[int, ...], list[tuple[dict[str, Any], asyncio.Future[Piece]]]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def initialize(self, addresses: Sequence[str] | None = None, *, api_key: str | None = None) -> None:
        """Connects to the servers `host:port`; without `addresses`, to those of MEGARL_LLM_SERVER_ADDRS.

        `api_key` is the servers' key, else MEGARL_LLM_SERVER_API_KEY. Raises UserError where a server does not answer.
        """
        if self._thread is not None:
            raise UserError("the rollout engine is initialized already; call destroy() first")
        given = os.environ.get(ADDRESSES_VARIABLE, "").split(",") if addresses is None else addresses
        self.addresses = [address.strip().removeprefix("http://").rstrip("/") for address in given if address.strip()]
        if not self.addresses:
            raise UserError(
                f"no SGLang server is known: pass addresses, or set {ADDRESSES_VARIABLE}=host:port[,host:port...]"
            )
        self._under_way = dict.fromkeys(self.addresses, 0)
        self._thread = LoopThread("rollout")
        try:
            self._thread.run(
                self._open(api_key or os.environ.get(KEY_VARIABLE)),
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

    def set_version(self, version: int) -> None:
        self._version = version
        if self._stream is not None:
            self._stream.set_version(version)

    def get_version(self) -> int:
        return self._version

    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow) -> PackedBatch:
        """Runs one episode per item of `data` at once and returns their groups in the order of `data`.

        Adds `group_ids`, the positions in `data`. Rejected prompts are left out; `episodes` says which and why. Raises
        what the first failing episode raised (`WorkflowError`, `UserError`), TimeoutError after `batch_timeout_s`.
        """
        if self._thread is None:
            raise UserError("the rollout engine is not initialized; call initialize() first")
        batch, self.episodes = rollout_batch(self, self._thread, data, workflow, self.config.batch_timeout_s)
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
        and why. Raises WorkflowError, GenerationError, or TimeoutError after `batch_timeout_s`.
        """
        stream = self._stream_of(dataloader, workflow, workflow_kwargs or {}, should_accept_fn, group_size, dynamic_bs)
        start = time.perf_counter()
        with stats_tracker.scope("rollout"):
            self.episodes = stream.next_batch(self.config.batch_timeout_s)
            batch = assemble(self.episodes)
            record_stats(self.episodes, batch, self._version, time.perf_counter() - start)
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
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        fruitless = 0
        while True:
            piece = await self._ask(req.input_ids + tokens, sampling_params(req.gconfig, len(tokens)))
            tokens += piece.tokens
            logprobs += piece.logprobs
            versions += piece.versions
            reason = piece.stop_reason
            if reason == "abort" and len(tokens) >= req.gconfig.max_new_tokens:
                reason = "length"
            if reason != "abort":
                break
            stats_tracker.total(interruptions=1)
            fruitless = 0 if piece.tokens else fruitless + 1
            if fruitless > self.config.max_retries:
                raise GenerationError(f"request {req.rid} was aborted {fruitless} times in a row without a new token")
            if fruitless:
                await asyncio.sleep(self.config.retry_delay_s)
        stats_tracker.scalar(truncated=float(reason == "length"))
        return ModelResponse(
            list(req.input_ids), tokens, logprobs, versions, "length" if reason == "length" else "stop"
        )

    async def _open(self, api_key: str | None) -> None:
        config = self.config
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=config.max_connections, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=config.connect_timeout_s, sock_read=config.request_timeout_s
            ),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )
        await asyncio.gather(*(self._check(self._session, address) for address in self.addresses))

    async def _check(self, session: aiohttp.ClientSession, address: str) -> None:
        """Raises UserError unless an SGLang server answers at `address` and labels its weights with a number."""
        try:
            async with session.get(f"http://{address}/model_info") as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UserError(
                f"no SGLang server answers at {address} ({_named(error)}); start it, or mend {ADDRESSES_VARIABLE}"
            ) from error
        if status == 401:
            raise UserError(f"the SGLang server at {address} refuses the API key; set {KEY_VARIABLE}")
        try:
            label = json.loads(body)["weight_version"] if status == 200 else None
            _version(label)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{address} answers /model_info with {status} {_excerpt(body)}: it must be an SGLang server, "
                "started with --weight-version 0"
            ) from error

    async def _ask(self, input_ids: list[int], params: dict[str, Any]) -> Piece:
        """Queues one completion. Those for the same tokens, queued in one turn of the loop, are sent together."""
        loop = asyncio.get_running_loop()
        key = tuple(input_ids)
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(self._send_group, key)
        future: asyncio.Future[Piece] = loop.create_future()
        self._waiting[key].append((params, future))
        return await future

    def _send_group(self, key: tuple[int, ...]) -> None:
        group = self._waiting.pop(key)
        futures = [future for _, future in group]
        task = asyncio.get_running_loop().create_task(self._serve(list(key), [params for params, _ in group], futures))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def give_up(_: asyncio.Future[Piece]) -> None:
            if all(future.cancelled() for future in futures):
                task.cancel()  # closes the connection, upon which the server drops the requests

        for future in futures:
            future.add_done_callback(give_up)

    async def _serve(
        self, input_ids: list[int], params: list[dict[str, Any]], futures: list[asyncio.Future[Piece]]
    ) -> None:
        try:
            pieces = await self._post(input_ids, params)
        except Exception as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        else:
            for future, piece in zip(futures, pieces, strict=True):
                if not future.done():
                    future.set_result(piece)

    async def _post(self, input_ids: list[int], params: list[dict[str, Any]]) -> list[Piece]:
        """Sends a group, again on lost connections and 5xx, each time to the least loaded server not tried yet."""
        body = {"input_ids": [input_ids] * len(params), "sampling_params": params, "return_logprob": True}
        tried: list[str] = []
        while True:
            untried = [address for address in self.addresses if address not in tried]
            address = min(untried or self.addresses, key=self._under_way.__getitem__)
            tried.append(address)
            self._under_way[address] += len(params)
            try:
                status, answer = await self._post_once(address, body)
            except aiohttp.SocketTimeoutError as error:
                raise GenerationError(
                    f"{address} did not answer within rollout.request_timeout_s={self.config.request_timeout_s:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                failure = f"the connection to {address} failed ({_named(error)})"
            else:
                if status == 200:
                    return parse_answer(answer, len(params), address)
                failure = f"{address} answered {status}: {_excerpt(answer)}"
                if status < 500:
                    raise RequestRefused(failure)
            finally:
                self._under_way[address] -= len(params)
            if len(tried) > self.config.max_retries:
                raise GenerationError(f"{failure}; that was attempt {len(tried)} of {self.config.max_retries + 1}")
            stats_tracker.total(retries=1)
            await asyncio.sleep(self.config.retry_delay_s * 2 ** (len(tried) - 1))

    async def _post_once(self, address: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            raise GenerationError("the rollout engine is not initialized; call initialize() first")
        async with self._session.post(f"http://{address}/generate", json=body) as response:
            return response.status, await response.read()


def sampling_params(gconfig: GenerationHyperparameters, done: int = 0) -> dict[str, Any]:
    """SGLang's `sampling_params` of a completion that has `done` tokens already."""
    params: dict[str, Any] = {
        "max_new_tokens": gconfig.max_new_tokens - done,
        "min_new_tokens": max(gconfig.min_new_tokens - done, 0),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k,
    }
    if gconfig.stop:
        params["stop"] = list(gconfig.stop)
    if gconfig.stop_token_ids:
        params["stop_token_ids"] = list(gconfig.stop_token_ids)
    return params


def parse_answer(body: bytes, count: int, address: str) -> list[Piece]:
    """The `count` pieces in the body of a 200 answer of `/generate`. Raises GenerationError on anything unexpected."""
    try:
        answers = json.loads(body)
        if len(answers) != count:
            raise ValueError(f"{len(answers)} completions instead of {count}")
        return [_parse_piece(answer["output_ids"], answer["meta_info"]) for answer in answers]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise GenerationError(f"{address} gave a malformed answer ({_named(error)}): {_excerpt(body)}") from error


def _parse_piece(output_ids: list[int], meta: dict[str, Any]) -> Piece:
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {reason!r}")
    if not output_ids and reason == "abort":
        return Piece([], [], [], reason)
    scored = meta["output_token_logprobs"]
    if [entry[1] for entry in scored] != output_ids:
        raise ValueError(f"output_token_logprobs of {len(scored)} tokens do not belong to {len(output_ids)} output_ids")
    logprobs = [float(entry[0]) for entry in scored]
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("a log-prob that is not finite")
    versions: list[int] = []
    for span in meta["weight_versions"]:
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions has a gap at token {len(versions)}")
        versions += [_version(span["version"])] * (span["end"] - span["start"])
    if len(versions) != len(output_ids):
        raise ValueError(f"weight_versions cover {len(versions)} of {len(output_ids)} tokens")
    return Piece(output_ids, logprobs, versions, reason)


def _version(label: Any) -> int:
    if not isinstance(label, str) or not label.isdecimal():
        raise ValueError(f"weight version {label!r} is not a number")
    return int(label)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _excerpt(body: bytes) -> str:
    return body[:EXCERPT].decode(errors="replace")
