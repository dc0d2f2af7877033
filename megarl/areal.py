"""Names of AReaL's scripts on megarl's parts, so that a script changes its imports alone; see docs/coming_from.md.

    from megarl.areal import FSDPPPOActor, RemoteSGLangEngine, RLVRWorkflow, WeightUpdateMeta, load_expr_config

`load_expr_config` returns a configuration that also answers to AReaL's names, and whose `actor` and `ref` carry the
algorithm and the layout. Rollout engine and actors of a process share one weight session, made at the first upload.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets.distributed import split_dataset_by_node

from megarl import cli
from megarl.actor.api import FinetuneSpec, TrainEngine
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.supervised import MegatronLMEngine
from megarl.algorithms import AlgorithmConfig, GRPOConfig, algorithm_of
from megarl.algorithms.decoupled_ppo import DecoupledPPOConfig
from megarl.config import Config
from megarl.data.collate import pad_sequences_to_tensors
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.knobs import UserError
from megarl.observe.gpu import log_gpu_stats
from megarl.observe.metrics import stats_tracker
from megarl.ops.logprob import gather_logprobs
from megarl.parallel.broadcast import broadcast_batch, broadcast_json, gather_json
from megarl.parallel.config import ParallelConfig
from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import WeightSession
from megarl.rewards.gsm8k import extract_solution
from megarl.rewards.math import equal, extract_boxed
from megarl.rollout.api import InferenceEngine, RolloutWorkflow
from megarl.rollout.client import sglang_client
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.served_checks import sampling_adapter
from megarl.types import GenerationHyperparameters, ModelRequest, PackedBatch, WeightUpdateMeta

__all__ = [
    "FSDPEngine",
    "FSDPLMEngine",
    "FSDPPPOActor",
    "FinetuneSpec",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngine",
    "LLMRequest",
    "ModelRequest",
    "MultiTurnWorkflow",
    "RLVRWorkflow",
    "RemoteSGLangEngine",
    "RolloutWorkflow",
    "TrainEngine",
    "WeightUpdateMeta",
    "extract_answer",
    "extract_solution",
    "gather_logprobs",
    "load_expr_config",
    "load_hf_tokenizer",
    "log_gpu_stats",
    "pad_sequences_to_tensors",
    "process_results",
    "split_dataset_by_node",
    "stats_tracker",
]

LLMRequest = ModelRequest


@dataclasses.dataclass(frozen=True)
class ActorConfig(EngineConfig):
    """A model's knobs with the algorithm and layout that its engine needs, and AReaL's name for the KL coefficient."""

    algorithm: AlgorithmConfig = dataclasses.field(default_factory=GRPOConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    trainable: bool = True

    @property
    def kl_ctl(self) -> float:
        """Coefficient of the KL penalty; 0 needs no reference."""
        return float(getattr(self.algorithm, "kl_coef", 0.0))


class ScriptConfig:
    """A run's configuration under AReaL's names; every other name is that of `Config`."""

    def __init__(self, config: Config, trial_name: str) -> None:
        self.config = config
        self.trial_name = trial_name
        actor = {field.name: getattr(config.actor, field.name) for field in dataclasses.fields(config.actor)}
        self.actor = ActorConfig(**actor, algorithm=config.algorithm, parallel=config.parallel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    @property
    def ref(self) -> ActorConfig | None:
        """The frozen start policy, or None if the algorithm does not read it."""
        needed = algorithm_of(self.config.algorithm).needs_reference
        return dataclasses.replace(self.actor, trainable=False) if needed else None

    @property
    def tokenizer_path(self) -> str:
        """Folder or hub name of the tokenizer: the model's."""
        return self.config.actor.path

    @property
    def async_training(self) -> bool:
        """True if rollouts go on while the trainer trains."""
        return self.config.rollout.max_head_offpolicyness > 0

    @property
    def dynamic_bs(self) -> bool:
        """False: a rejected prompt is replaced by another, so that batches keep their size."""
        return False

    @property
    def total_train_epochs(self) -> int:
        """1: megarl counts a run in steps, `total_train_steps`."""
        return 1


def load_expr_config(
    arguments: list[str], algorithm: type[AlgorithmConfig] = AlgorithmConfig
) -> tuple[Any, Path | None]:
    """Reads a script's command line as `cli.load_expr_config` does, and returns a `ScriptConfig`.

    Raises:
        UserError: see there.
    """
    config, file = cli.load_expr_config(arguments)
    decoupled = isinstance(config.algorithm, DecoupledPPOConfig)  # AReaL's GRPOConfig has both losses
    if algorithm is not GRPOConfig or not decoupled:
        cli.check_algorithm(config, algorithm)
    folder = os.environ.get("MEGARL_RUN_FOLDER", "")
    SESSION.config = config.reshard
    SESSION.adapter = sampling_adapter(config)
    return ScriptConfig(config, Path(folder).name), file


class SharedSession:
    """The weight session of a process's engines, made by the first upload. A `WeightUpdates`.

    `expect` may come before, on rank 0 alone; the session itself is made by all ranks together.
    """

    def __init__(self) -> None:
        self.config = ReshardConfig()
        self.adapter = ""  # name of the servers' adapter that samples
        self.addresses: list[str] = []
        self.api_key = ""
        self.base = 0  # version of the servers for a script's version 0
        self.rollouts: list[ConnectedRollout] = []
        self._session: WeightSession | None = None
        self._expected: dict[int, Future[Any]] = {}

    def begin(self, weights: Any) -> None:
        """Brings servers that hold a later version, from an earlier run, to the start weights. A collective.

        The script's versions then count from there, in uploads and in its rollout engines.
        """
        if not broadcast_json(bool(self.addresses)):
            return
        session = self._open()
        if (served := session.served_version()) > 0:
            self.base = served + 1
            session.push(weights, self.base)
            for rollout in self.rollouts:
                rollout.set_version(0)

    def _open(self) -> WeightSession:
        if self._session is None:
            self._session = WeightSession(self.config, self.addresses, self.api_key)
        return self._session

    def expect(self, meta: WeightUpdateMeta) -> Future[Any]:
        """A future that ends when `upload` has brought the servers to `meta.model_version`."""
        return self._expected.setdefault(meta.model_version, Future())

    def upload(self, weights: Any, meta: WeightUpdateMeta) -> None:
        """Pushes the weights as `meta` says. A collective; a failure is raised here and in the future."""
        future = self._expected.pop(meta.model_version, None) or Future()
        try:
            folder, version = Path(meta.path) if meta.path else None, self.base + meta.model_version
            future.set_result(self._open().push(weights, version, transport=meta.type, folder=folder))
        except BaseException as error:
            future.set_exception(error)
            raise

    def close(self) -> None:
        """Leaves the servers' groups; a later upload makes another session."""
        session, self._session, self.base = self._session, None, 0
        if session is not None:
            session.close()


SESSION = SharedSession()


class ConnectedRollout(sglang_client.RemoteSGLangEngine):
    """The rollout client, which knows the process's weight session."""

    def initialize(self, addresses: Any = None, ft_spec: Any = None, *, api_key: str | None = None) -> None:
        self.adapter = SESSION.adapter
        super().initialize(addresses, ft_spec, api_key=api_key)
        SESSION.addresses = list(self.addresses)
        SESSION.api_key = api_key or os.environ.get(sglang_client.KEY_VARIABLE, "")
        SESSION.rollouts.append(self)
        self.connect(SESSION)

    def set_version(self, version: int) -> None:
        """Sets the version of the script, which the servers count from another start (`SharedSession.begin`)."""
        super().set_version(SESSION.base + version)


RemoteSGLangEngine = ConnectedRollout


class _Connected(MegatronEngine):
    """Base of AReaL's engines: constructed from one config, connected to the process's weight session."""

    def initialize(
        self, addr: str | None = None, ft_spec: FinetuneSpec | None = None, base: MegatronEngine | None = None
    ) -> None:
        super().initialize(addr, ft_spec, base)
        self.connect(SESSION)
        if self.trainable:
            SESSION.begin(self)

    def destroy(self) -> None:
        if self.trainable:
            SESSION.close()
        super().destroy()


class FSDPEngine(_Connected):
    """`MegatronEngine(config)`, with the layout of the config."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, getattr(config, "parallel", None))


class FSDPLMEngine(_Connected, MegatronLMEngine):
    """`MegatronLMEngine(config)`, with the layout of the config."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, getattr(config, "parallel", None))


class FSDPPPOActor(_Connected, MegatronPPOActor):
    """`MegatronPPOActor(config)` with the algorithm and layout of the config, GRPO and one rank by default.

    `config.ref` makes a model without gradients and optimizer, whose `compute_logp` gives the reference's log-probs.
    """

    def __init__(self, config: EngineConfig) -> None:
        algorithm = algorithm_of(getattr(config, "algorithm", GRPOConfig()))
        trainable = getattr(config, "trainable", True)
        super().__init__(config, algorithm, getattr(config, "parallel", None), trainable=trainable)
        self._rollout: sglang_client.RemoteSGLangEngine | None = None

    def connect_engine(self, engine: sglang_client.RemoteSGLangEngine, meta: WeightUpdateMeta | None = None) -> None:
        """Sets the client that `prepare_batch` and `rollout_batch` sample with. `meta` is not needed."""
        self._rollout = engine

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: str | RolloutWorkflow | Callable[..., RolloutWorkflow],
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: Any = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> PackedBatch:
        """Samples the next batch of this data parallel rank's own dataloader; see `RemoteSGLangEngine.prepare_batch`.

        A collective. The first rank of each data parallel rank samples, and the others get its batch.
        """
        return self._of_heads(
            lambda rollout: rollout.prepare_batch(
                dataloader, workflow, workflow_kwargs, should_accept_fn, group_size, dynamic_bs
            )
        )

    def rollout_batch(self, data: Any, workflow: str | RolloutWorkflow) -> PackedBatch:
        """Samples the data of this data parallel rank; see `prepare_batch`."""
        return self._of_heads(lambda rollout: rollout.rollout_batch(data, workflow))

    def _of_heads(self, sample: Callable[[sglang_client.RemoteSGLangEngine], PackedBatch]) -> PackedBatch:
        """Samples on the first rank of each data parallel rank. A failure there is raised on all ranks."""
        if self._rollout is None:
            raise UserError("actor.prepare_batch: connect_engine(rollout) first; it samples with that engine")
        own_rank = dist.get_rank()
        places = gather_json(self.data_parallel_rank)
        heads = [places.index(place) for place in sorted(set(places))]
        batch, error = None, None
        if own_rank in heads:
            try:
                batch = sample(self._rollout)
            except Exception as caught:
                error = caught
        failures = [text for text in gather_json(str(error) if error is not None else None) if text is not None]
        if failures:
            raise error or UserError(f"another rank could not sample: {failures[0]}")
        parts = [broadcast_batch(batch if own_rank == head else None, head) for head in heads]
        own = parts[self.data_parallel_rank]
        own.shared = len(heads) == 1
        return own


def extract_answer(text: str, data_name: str = "math") -> str | None:
    r"""Extracts the final answer of a solution: the number after `####`, the last `\boxed{}`, else the last number.

    `data_name` selects a benchmark's answer format in AReaL. It is ignored: one rule covers all formats.
    """
    return extract_boxed(text) or extract_solution(text, method="flexible")


def process_results(answer: str, solution: str) -> tuple[int, tuple[str | None, str | None]]:
    """Compares the answers of a completion and of a reference mathematically.

    Returns 1 or 0, and the two extracted answers.
    """
    found, reference = extract_answer(answer), extract_answer(solution)
    right = found is not None and reference is not None and equal(found, reference)
    return int(right), (found, reference)
