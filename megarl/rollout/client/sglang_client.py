"""The client of the SGLang servers: requests over HTTP, answers as tokens with log-probs and weight versions."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from megarl.knobs import UserError, class_of
from megarl.observe.metrics import stats_tracker
from megarl.rollout.api import GenerationError, InferenceEngine, RolloutWorkflow
from megarl.rollout.bounded_staleness import RolloutStream, ShouldAccept, StreamLimits
from megarl.rollout.client.completions import Completions
from megarl.rollout.client.connections import (
    ADDRESSES_VARIABLE,
    KEY_VARIABLE,
    Connections,
    addresses_in_environment,
    plain_address,
)
from megarl.rollout.client.requests import sampling_params
from megarl.rollout.client.routes import RouteShape
from megarl.rollout.config import RolloutConfig
from megarl.rollout.executor import LoopThread, assemble, record_stats, rollout_batch
from megarl.rollout.routing import Fleet, Router, ServerLost
from megarl.types import (
    Episode,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    PackedBatch,
    WeightUpdateMeta,
    WeightUpdates,
)

CLOSE_TIMEOUT_S = 60.0  # for calls that the loop answers at once, and to close workflows

T = TypeVar("T")


def workflow_of(
    workflow: RolloutWorkflow | Callable[..., RolloutWorkflow] | str, arguments: Mapping[str, Any]
) -> RolloutWorkflow:
    """Returns a workflow, or makes it of `arguments` by a function or by the class `MODULE.CLASS`.

    Raises:
        UserError: the class does not exist.
    """
    if isinstance(workflow, RolloutWorkflow):
        return workflow
    if isinstance(workflow, str):
        kind: Any = class_of(workflow, f"workflow={workflow}", RolloutWorkflow)
        return workflow_of(kind, arguments)
    return workflow(**arguments)


class RemoteSGLangEngine(InferenceEngine):
    """SGLang servers reached over HTTP, used from synchronous code; its asyncio loop runs in a thread of its own."""

    def __init__(self, config: RolloutConfig, seed: int | None = None):
        """With `seed`, each completion has a seed that follows from it and the episode, for deterministic servers."""
        self.config = config
        self.seed = seed
        self.router = Router(config.max_per_server)
        self.adapter = ""  # name of the servers' adapter that samples; empty: the model without one
        self.routes: RouteShape | None = None  # of the model, if answers must have routes
        self.episodes: list[Episode] = []  # the last batch's, in the order of its prompts
        self._version = 0
        self._updates: WeightUpdates | None = None
        self._stream: RolloutStream | None = None
        self._saved: dict[str, Any] | None = None  # state for the stream, until it exists
        self._workflows: list[RolloutWorkflow] = []  # closed by `destroy`
        self._thread: LoopThread | None = None
        self._connections: Connections | None = None
        self._completions: Completions | None = None

    def initialize(
        self, addresses: Sequence[str] | None = None, ft_spec: Any = None, *, api_key: str | None = None
    ) -> None:
        """Connects to the servers `host:port`; without `addresses`, to the servers in MEGARL_LLM_SERVER_ADDRS.

        `ft_spec` is ignored: the train engines' `initialize` takes the same arguments. `api_key` is the servers' key,
        else MEGARL_LLM_SERVER_API_KEY. Raises UserError if a server does not answer.
        """
        if self._thread is not None:
            raise UserError("the rollout engine is initialized already; call destroy() first")
        plain = addresses_in_environment() if addresses is None else [plain_address(a) for a in addresses]
        if not plain:
            raise UserError(
                f"no SGLang server is known: pass addresses, or set {ADDRESSES_VARIABLE}=host:port[,host:port...]"
            )
        self._thread = LoopThread("rollout")
        try:
            self._thread.run(
                self._open(plain, api_key or os.environ.get(KEY_VARIABLE)),
                (self.config.connect_timeout_s + self.config.request_timeout_s) * 2,
                "connecting to the SGLang servers",
            )
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Cancels requests under way, closes workflows and connections and ends the thread. May be called twice."""
        thread, connections, workflows = self._thread, self._connections, self._workflows
        self._thread = self._connections = self._completions = self._stream = None
        self._workflows = []
        if thread is None:
            return

        async def close() -> None:
            try:
                for workflow in workflows:
                    await workflow.aclose()
            finally:
                if connections is not None:
                    await connections.close()

        with contextlib.ExitStack() as closing:
            what = "closing the workflows and the connections to the SGLang servers"
            closing.callback(thread.stop)
            closing.callback(lambda: thread.run(close(), CLOSE_TIMEOUT_S, what))
            closing.callback(thread.cancel_all)  # before the endpoints that episodes talk to, and would start again

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that requests go to."""
        return self.router.addresses

    def follow(self, fleet: Fleet) -> None:
        """Lets `fleet` decide which servers are asked; call `refresh` after each change of it."""
        self.router.fleet = fleet
        self.refresh()

    def refresh(self) -> None:
        """Takes over the fleet's list of servers; requests under way at other servers are resent. From any thread."""
        thread = self._thread
        if thread is not None:
            thread.loop.call_soon_threadsafe(self.router.refresh)

    def set_version(self, version: int) -> None:
        self._version = version
        self.router.sync_ended = None
        if self._stream is not None:
            with stats_tracker.scope("rollout"):  # for the episodes that it starts
                self._stream.set_version(version)

    def expect_version(self, version: int, sync_ended: Callable[[], bool]) -> None:
        """Takes batches at the trainer's version, which servers receive until `sync_ended()`. Starts no prompt."""
        self._version = version
        self.router.sync_ended = sync_ended
        if self._stream is not None:
            self._stream.expect_version(version)

    def get_version(self) -> int:
        return self._version

    def rollout_batch(self, data: Sequence[Mapping[str, Any]], workflow: RolloutWorkflow | str) -> PackedBatch:
        """Runs one episode per item of `data` at once and returns their groups in the order of `data`.

        Adds `group_ids`, the positions in `data`. Rejected prompts are left out; `episodes` lists them with the reason.

        Raises:
            WorkflowError, UserError: the error of the first episode that failed.
            TimeoutError: after `batch_timeout_s`.
            WeightsWanted: no server can answer before a weight push.
        """
        workflow = workflow_of(workflow, {})
        self._close_later(workflow)
        batch, self.episodes = rollout_batch(
            self, self._loop_thread, data, workflow, self.config.batch_timeout_s, self.router.unless_wanted
        )
        return batch

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: RolloutWorkflow | Callable[..., RolloutWorkflow] | str,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAccept | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> PackedBatch:
        """Returns the next batch of `dataloader`, sampled while the trainer trains (`rollout/bounded_staleness.py`).

        Args:
            dataloader: yields lists of prompts, has `batch_size`, and best a `state_dict`; the same at every call.
            workflow: a workflow, or a function or `MODULE.CLASS` that makes one of `workflow_kwargs`.
            should_accept_fn: sees a prompt's packed group; if it returns False, another prompt is sampled instead.
            group_size: runs of the workflow for each prompt, joined to one group.
            dynamic_bs: rejected prompts are not replaced, so a batch may have fewer.

        Adds `group_ids`, the prompts' numbers in the order of the loader. `episodes` lists rejected prompts with the
        reason. Raises WorkflowError, GenerationError, TimeoutError after `batch_timeout_s`, or WeightsWanted if no
        server can answer before a weight push. Episodes under way then wait for it.
        """
        stream = self._stream_of(dataloader, workflow, workflow_kwargs or {}, should_accept_fn, group_size, dynamic_bs)
        with stats_tracker.scope("rollout"):
            self.episodes = stream.next_batch(self.config.batch_timeout_s, self.router.unless_wanted)
            batch = assemble(self.episodes)
            record_stats(self.episodes, batch, self._version, stream.sampled)
        return batch

    def _stream_of(
        self,
        dataloader: Any,
        workflow: RolloutWorkflow | Callable[..., RolloutWorkflow] | str,
        workflow_kwargs: Mapping[str, Any],
        should_accept_fn: ShouldAccept | None,
        group_size: int,
        dynamic_bs: bool,
    ) -> RolloutStream:
        if self._stream is None:
            config = self.config
            self._stream = RolloutStream(
                self,
                self._loop_thread,
                dataloader,
                self._close_later(workflow_of(workflow, workflow_kwargs)),
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

    def _close_later(self, workflow: RolloutWorkflow) -> RolloutWorkflow:
        """Has `destroy` close the workflow."""
        if isinstance(workflow, RolloutWorkflow) and all(workflow is not other for other in self._workflows):
            self._workflows.append(workflow)
        return workflow

    def state_dict(self) -> dict[str, Any]:
        """The prompts between the loader and the trainer, and the loader's position, for a checkpoint."""
        return self._stream.state_dict() if self._stream is not None else dict(self._saved or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state` at the first `prepare_batch`."""
        self._saved = dict(state) or None

    def connect(self, updates: WeightUpdates) -> None:
        """Sets the session that pushes weights (a `reshard.session.WeightSession`), for `update_weights`."""
        self._updates = updates

    def update_weights(self, meta: WeightUpdateMeta) -> Future[Any]:
        """Returns a future that ends when the servers serve `meta.model_version`, or with the error of a failed push.

        Call it on rank 0, before `actor.upload_weights`. Afterwards, call `set_version`.
        """
        if self._updates is None:
            raise UserError("update_weights: connect(session) first; a weight session pushes the weights")
        return self._updates.expect(meta)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One completion, in one part unless a weight update aborted it: then it continues after the tokens so far.

        `rid` is never sent to the servers, so requests may share one. Raises `RequestRefused` on a 4xx answer,
        `GenerationError` on anything else that leaves no completion.
        """
        (response,) = await self._running().complete(req, 1, self.seed)
        return response

    async def agenerate_group(self, req: ModelRequest) -> list[ModelResponse]:
        """`req.gconfig.n_samples` completions, each like that of `agenerate`."""
        return await self._running().complete(req, req.gconfig.n_samples, self.seed)

    def _running(self) -> Completions:
        if self._completions is None:
            raise GenerationError("the rollout engine is not initialized; call initialize() first")
        return self._completions

    async def _open(self, addresses: Sequence[str], api_key: str | None) -> None:
        self._connections = Connections(self.config, api_key, self.adapter, self.routes)
        self._completions = Completions(self.config, self.router, self._connections)
        await asyncio.gather(*(self._connections.check(address) for address in addresses))
        self.router.set(addresses)

    # -- around a weight sync -----------------------------------------------------------------------------------

    def hold(self, version: int) -> None:
        """Withholds answers with tokens of `version` until `release`. Call it before a server may give one."""
        self._on_loop(lambda: self.router.hold(version), "withholding answers")

    def release(self) -> None:
        """Hands over the withheld answers of the servers that are still in service. The others are asked again."""
        self._on_loop(self.router.release, "handing over answers")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `coroutine` on the engine's own loop, from another one."""
        return self._loop_thread.submit(coroutine)

    @property
    def _loop_thread(self) -> LoopThread:
        if self._thread is None:
            raise UserError("the rollout engine is not initialized; call initialize() first")
        return self._thread

    def _on_loop(self, call: Callable[[], None], what: str) -> None:
        async def run() -> None:
            call()

        self._loop_thread.run(run(), CLOSE_TIMEOUT_S, what)

    def probe(
        self, addresses: Sequence[str], prompts: Sequence[list[int]], gconfig: GenerationHyperparameters
    ) -> dict[str, list[ModelResponse] | GenerationError]:
        """Asks each server for one completion of every prompt, all at once; nothing is withheld.

        Returns the completions or the failure of each server, without servers taken out of service meanwhile.
        """
        thread, connections = self._loop_thread, self._connections
        assert connections is not None, "made with the thread"
        params = [sampling_params(gconfig)] * len(prompts)

        async def ask(address: str) -> list[ModelResponse] | GenerationError | None:
            try:
                answer = connections.generate_with_retries(address, prompts, params)
                parts = await self.router.unless_lost(address, answer)
            except ServerLost:
                return None
            except GenerationError as error:
                return error
            return [
                ModelResponse(list(ids), part.tokens, part.logprobs, part.versions, routed_experts=part.routes)
                for ids, part in zip(prompts, parts, strict=True)
            ]

        async def ask_all() -> list[list[ModelResponse] | GenerationError | None]:
            return await asyncio.gather(*(ask(address) for address in addresses))

        answers = thread.run(ask_all(), self.config.batch_timeout_s, "asking each server for a few tokens")
        return {address: answer for address, answer in zip(addresses, answers, strict=True) if answer is not None}
