"""What a run is, worked out from its configuration and its model's shape alone: machines, batch, memory, disk.

Nothing here needs a GPU, a process group or the network; `megarl.preflight` prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.memory import (
    ITEM_BYTES,
    MAIN,
    MOMENTS,
    ServerMemory,
    StepLoad,
    TrainerMemory,
    count_parameters,
    server_memory,
    trainer_memory,
)
from megarl.algorithms import RLConfig, algorithm_of
from megarl.config import Config

GIB = 2**30
# What SGLang 0.5.23 gives weights and cache of an 80 GB GPU: it leaves 1.5 MB for each of the 8192 tokens of a prefill
# and 1.5 GB (srt/arg_groups/memory_hook.py).
SERVER_SHARE = 0.83


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


# -- machines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machines:
    """Which GPU every trainer rank and server rank gets: trainers first, servers on the nodes after them."""

    gpus_per_node: int
    trainers: int
    servers: int
    server_tp: int

    @property
    def trainer_nodes(self) -> int:
        return math.ceil(self.trainers / self.gpus_per_node)

    @property
    def shared(self) -> bool:
        """Whether what the trainers leave free on their last node takes all servers."""
        return self.trainers + self.servers * self.server_tp <= self.trainer_nodes * self.gpus_per_node

    @property
    def first_server_gpu(self) -> int:
        return self.trainers if self.shared else self.trainer_nodes * self.gpus_per_node

    @property
    def nodes(self) -> int:
        last = self.first_server_gpu + self.servers * self.server_tp if self.servers else self.trainers
        return math.ceil(last / self.gpus_per_node)


def machines_of(config: Config) -> Machines:
    """The run's ranks over its nodes; without GPUs all on one."""
    servers = config.server.n_servers if config.method == "rl" else 0
    trainers, tp = config.parallel.world_size(), config.server.tp_size
    return Machines(config.cluster.gpus_per_node or trainers + servers * tp, trainers, servers, tp)


# -- batch ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchAlgebra:
    """How a step's sequences are divided, where every sequence is as long as it may be."""

    rows: int  # prompts, examples or preferences of a step
    per_row: int  # sequences that are trained on, of each
    minibatches: int  # optimizer steps of a step
    dp: int  # data parallel replicas
    longest: int  # tokens of a sequence
    max_tokens: int  # of a microbatch
    together: int = 1  # sequences that are never parted: the two of a pair
    multiple: int = 1  # what the number of microbatches is rounded up to

    @property
    def sequences(self) -> int:
        return self.rows * self.per_row

    @property
    def per_update(self) -> int:
        return self.sequences // self.minibatches

    @property
    def per_replica(self) -> int:
        """Of the replica with the most."""
        return math.ceil(self.per_update // self.together / self.dp) * self.together

    @property
    def per_microbatch(self) -> int:
        """As many as fit; at least one unit, which a run refuses where it does not fit."""
        return max(1, self.max_tokens // (self.longest * self.together)) * self.together

    @property
    def microbatches(self) -> int:
        """Of an optimizer step, on each replica."""
        return math.ceil(math.ceil(self.per_replica / self.per_microbatch) / self.multiple) * self.multiple

    def equations(self, names: tuple[str, str]) -> list[tuple[str, str, str]]:
        """What, its equation, its meaning; `names` are those of a row and of what is made of it."""
        row, made = names
        found = [("a step", f"{self.rows} {row} x {self.per_row} {made} = {self.sequences} sequences", "")]
        if self.per_row == 1:
            found = [("a step", f"{self.rows} {row} = {self.sequences} sequences", "")]
        update = f"{self.sequences} sequences / {self.minibatches} minibatches = {self.per_update}"
        fits = f"floor({self.max_tokens} tokens / {self.longest * self.together})"
        if self.together > 1:
            fits += f" x {self.together}"
        count = f"ceil({self.per_replica} / {self.per_microbatch})"
        if self.multiple > 1:
            count += f", to a multiple of pp {self.multiple}"
        return [
            *found,
            ("an optimizer step", update, ""),
            ("a replica", f"{self.per_update} / dp {self.dp} = {self.per_update / self.dp:g}", "evened out by FLOPs"),
            ("a microbatch", f"{fits} = {self.per_microbatch}", "sequences of full length"),
            ("microbatches", f"{count} = {self.microbatches}", "of an optimizer step, where all have full length"),
            ("tokens of a step", f"{self.sequences} x {self.longest} = {self.sequences * self.longest:,}", "at most"),
        ]


def longest_sequence(config: Config) -> int | None:
    """Tokens of the longest sequence that the run can train on."""
    if config.train_dataset.max_length is None:
        return None
    return config.train_dataset.max_length + (config.gconfig.max_new_tokens if config.method == "rl" else 0)


def is_paired(config: Config) -> bool:
    """Whether rows are pairs of completions, which are trained on together."""
    return config.method == "preference" and getattr(algorithm_of(config.algorithm), "paired", False)


def batch_of(config: Config) -> BatchAlgebra:
    """The algebra of the configuration's batch."""
    per_row, minibatches, together = 1, 1, 1
    if config.method == "rl" and isinstance(config.algorithm, RLConfig):
        per_row, minibatches = config.gconfig.n_samples, config.algorithm.n_minibatches
    elif is_paired(config):
        per_row = together = 2
    parallel, most = config.parallel, config.actor.max_tokens_per_mb
    return BatchAlgebra(
        rows=config.train_dataset.batch_size,
        per_row=per_row,
        minibatches=max(1, minibatches),  # what is below 1 is refused elsewhere
        dp=parallel.sizes()["dp_size"],
        longest=max(1, min(longest_sequence(config) or most, most)),
        max_tokens=most,
        together=together,
        multiple=parallel.pp_size if parallel.vpp_size > 1 else 1,
    )


def load_of(config: Config) -> StepLoad:
    """The most that a data parallel rank works on in one optimizer step: sequences of full length, which shorter ones
    fill up to a full microbatch where there are enough."""
    batch = batch_of(config)
    return StepLoad(min(batch.max_tokens, batch.per_replica * batch.longest), batch.microbatches)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_of(config: Config, model: PretrainedConfig) -> list[TrainerMemory]:
    """Of a trainer rank, by pipeline rank: the actor alone, see `beside_actor`."""
    on_gpu, load = config.cluster.gpus_per_node > 0, load_of(config)
    return [
        trainer_memory(model, config.parallel, config.actor, load, rank, on_gpu)
        for rank in range(config.parallel.pp_size)
    ]


def needs_reference(config: Config) -> bool:
    """Whether a frozen start policy is kept beside the actor."""
    if config.method == "preference":
        uses = getattr(algorithm_of(config.algorithm), "needs_reference", False)
        return bool(uses) and config.reference.mode == "online"
    return config.method == "rl" and isinstance(config.algorithm, RLConfig) and config.algorithm.kl_coef > 0


def needs_critic(config: Config) -> bool:
    return config.method == "rl" and bool(getattr(algorithm_of(config.algorithm), "needs_critic", False))


def beside_actor(config: Config, stage: TrainerMemory) -> dict[str, int]:
    """Bytes of the other models of a rank that holds `stage` of the actor: a reference's weights are there while its
    log-probs are taken, a critic's weights, gradients and optimizer state always."""
    found = {}
    if needs_reference(config):
        found["reference"] = stage.weights
    if needs_critic(config):
        found["critic"] = stage.weights + stage.gradients + stage.optimizer
    return found


def server_dtype(config: Config, model: PretrainedConfig) -> str:
    """The dtype of the served weights; auto is the checkpoint's."""
    if config.server.dtype != "auto":
        return config.server.dtype
    return str(model.dtype).removeprefix("torch.") if model.dtype is not None else config.actor.dtype


def server_memory_of(config: Config, model: PretrainedConfig) -> ServerMemory:
    """Of a server rank; its cache holds what `cache_of` says."""
    tp, dtype = config.server.tp_size, server_dtype(config, model)
    return server_memory(model, tp, dtype, cache_of(config, model).tokens)


@dataclass(frozen=True)
class Cache:
    """The key/value cache of a server: bytes that a token takes on each rank, and how many tokens it holds."""

    token_bytes: int
    tokens: int
    share: float = 0.0  # of the GPU's memory that weights and cache have; 0: max_total_tokens says how many


def cache_of(config: Config, model: PretrainedConfig) -> Cache:
    """The cache as server.max_total_tokens says, or what fits into a GPU beside the weights: 0 tokens where nothing."""
    dtype = server_dtype(config, model)
    token = server_memory(model, config.server.tp_size, dtype, 1).kv_cache
    if config.server.max_total_tokens or not config.cluster.gpus_per_node:
        return Cache(token, config.server.max_total_tokens)
    share = float(config.sglang.get("mem_fraction_static") or SERVER_SHARE)
    weights = server_memory(model, config.server.tp_size, dtype, 0).weights
    free = share * config.cluster.gpu_memory_gib * GIB - weights
    return Cache(token, max(0, int(free / token)), share)


# -- disk -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes. A checkpoint is complete before the oldest is removed."""

    checkpoint: int
    keep: int
    export: int

    @property
    def total(self) -> int:
        return self.checkpoint * (self.keep + 1) + self.export


def disk_of(config: Config, model: PretrainedConfig) -> Disk:
    """Weights, the float32 main parameters of bfloat16 ones, and Adam's moments, as `actor/checkpoint/stored_state.py` keeps them."""
    item = ITEM_BYTES[config.actor.dtype]
    each = count_parameters(model) * (item + (MAIN if item < MAIN else 0) + MOMENTS)
    engines = 2 if needs_critic(config) else 1
    export = count_parameters(model) * item if config.saver.export_hf else 0
    return Disk(each * engines, config.saver.keep, export)
