"""Memory and disk of a run, worked out from its configuration and its model's shape alone.

Nothing here needs a GPU, a process group or the network.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial

from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig
from megarl.actor.sizes.memory import (
    GPU_RUNTIME,
    GRADIENT,
    ITEM_BYTES,
    MAIN,
    MOMENTS,
    StepLoad,
    TrainerMemory,
    trainer_memory,
)
from megarl.actor.sizes.parameter_counts import count_parameters, rank_parameters
from megarl.actor.sizes.server_memory import ServerMemory, cache_token_bytes, server_memory
from megarl.algorithms import OPDConfig, RewardModelConfig, RLConfig, algorithm_of
from megarl.config import Config
from megarl.families import decoder, read_config
from megarl.families.hf_config import padded_vocab_size
from megarl.ops.head_chunks import KEPT_SHARE_OF_MEMORY, divergence_bytes
from megarl.parallel.config import ParallelConfig
from megarl.preflight.planned_places import trainers_on_gpu
from megarl.preflight.planned_sync import server_sync, staging_name, trainer_sync
from megarl.preflight.shapes import folder_of, server_dtype, teacher_of
from megarl.reshard.plan.sglang_adapters import slot_elements
from megarl.served_checks import adapters_on_servers
from megarl.trainer.batch_algebra import batch_of

GIB = 2**30
# Part of an 80 GB GPU that SGLang 0.5.23 gives weights and cache. It reserves 1.5 GB, and 1.5 MB for each of the 8192
# tokens of a prefill (srt/arg_groups/memory_hook.py).
SERVER_SHARE = 0.83


def size(nbytes: float) -> str:
    """Formats bytes, such as `1.5 GiB`."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


# -- batch ------------------------------------------------------------------------------------------------------------


def load_of(config: Config) -> StepLoad:
    """Largest load of a data parallel rank in one optimizer step.

    Counts sequences of full length. Shorter ones fill a microbatch completely, if there are enough of them.
    """
    batch = batch_of(config)
    return StepLoad(min(batch.max_tokens, batch.per_replica * batch.longest), batch.microbatches)


# -- memory -----------------------------------------------------------------------------------------------------------


def memory_of(config: Config, model: PretrainedConfig) -> list[TrainerMemory]:
    """Memory of a trainer rank, by pipeline rank. The actor alone; `beside_actor` has the other models."""
    on_gpu, load = config.cluster.gpus_per_node > 0, load_of(config)
    return [
        trainer_memory(model, config.parallel, config.actor, load, rank, on_gpu)
        for rank in range(config.parallel.pp_size)
    ]


def needs_reference(config: Config) -> bool:
    """True if a frozen start policy is kept beside the actor."""
    if config.method == "preference":
        uses = getattr(algorithm_of(config.algorithm), "needs_reference", False)
        return bool(uses) and config.reference.mode == "online"
    return config.method == "rl" and isinstance(config.algorithm, RLConfig) and config.algorithm.kl_coef > 0


def needs_critic(config: Config) -> bool:
    return config.method == "rl" and bool(getattr(algorithm_of(config.algorithm), "needs_critic", False))


def teacher_bytes(config: Config, parallel: ParallelConfig, load: StepLoad) -> int:
    """Bytes of a frozen teacher on the fullest rank; 0 without one.

    Its weights are resident while it computes. For divergence=full, a copy of its LM head and the hidden states of an
    optimizer step's tokens stay while the student is updated.
    """
    teacher = teacher_of(config)
    if teacher is None or not isinstance(config.algorithm, OPDConfig):
        return 0
    weights = _teacher_weights(config.teacher.path, replace(parallel, cp_size=1, dp_size=1), config)
    if config.algorithm.divergence != "full":
        return weights
    item = ITEM_BYTES[config.actor.dtype]
    head = padded_vocab_size(teacher, parallel.tp_size) // parallel.tp_size * teacher.hidden_size * item
    return weights + head + load.all_tokens // parallel.cp_size * teacher.hidden_size * item


def distillation_bytes(config: Config, parallel: ParallelConfig, model: PretrainedConfig) -> int:
    """Bytes of the logits, and of all made of them, that a divergence from a teacher has at once; 0 without one."""
    algorithm = config.algorithm
    if not isinstance(algorithm, OPDConfig) or algorithm.divergence == "sampled":
        return 0
    vocab, top_k = padded_vocab_size(model, parallel.tp_size) // parallel.tp_size, algorithm.divergence == "top_k"
    return divergence_bytes(vocab, on_gpu=trainers_on_gpu(config), top_k=top_k, beta=algorithm.beta)


def kept_logits_bytes(config: Config, parallel: ParallelConfig, model: PretrainedConfig, load: StepLoad) -> int:
    """Bytes of logits that `heads.KeptLogits` keeps on a GPU at any free memory; 0 if it keeps none.

    Ranks that share the vocabulary go by the GPU's whole memory, and so does a deterministic run. Autograd's gradient
    of the head is beside them.
    """
    free_decides = parallel.tp_size == 1 and not config.deterministic
    if not trainers_on_gpu(config) or config.actor.kept_logits_mb >= 0 or free_decides:
        return 0
    if isinstance(config.algorithm, RewardModelConfig) or distillation_bytes(config, parallel, model):
        return 0  # no logits at all, or chunks alone
    vocab, item = padded_vocab_size(model, parallel.tp_size) // parallel.tp_size, ITEM_BYTES[config.actor.dtype]
    size = load.tokens // parallel.cp_size * vocab * (max(item, 4) if config.actor.float32_head else item)
    limit = KEPT_SHARE_OF_MEMORY * config.cluster.gpu_memory_gib * GIB
    return int(min(size, limit)) + vocab * model.hidden_size * item  # fewer labels may fit where all do not


def logits_bytes(config: Config, parallel: ParallelConfig, model: PretrainedConfig, load: StepLoad) -> dict[str, int]:
    """Bytes of logits on the last stage that `trainer_memory` leaves out, by what they are for."""
    named = {
        "logits of the divergence": distillation_bytes(config, parallel, model),
        "logits kept for backward": kept_logits_bytes(config, parallel, model, load),
    }
    return {name: nbytes for name, nbytes in named.items() if nbytes}


@functools.lru_cache(1024)
def _most_parameters(path: str, parallel: ParallelConfig) -> int:
    teacher = read_config(str(folder_of(path, "teacher.path")))
    counts = (rank_parameters(teacher, parallel, rank) for rank in {0, parallel.pp_size - 1})
    return max(count.dense + count.experts for count in counts)


def _teacher_weights(path: str, parallel: ParallelConfig, config: Config) -> int:
    return _most_parameters(path, parallel) * ITEM_BYTES[config.actor.dtype]


def weights_beside(actor: EngineConfig, stage: TrainerMemory) -> int:
    """Bytes of another trained model's weights beside the actor's: all, or its adapters on the actor's frozen base."""
    return stage.gradients // GRADIENT * ITEM_BYTES[actor.dtype] if actor.lora.rank else stage.weights


def model_beside(actor: EngineConfig, stage: TrainerMemory) -> int:
    """Bytes of another trained model beside the actor's: its weights, gradients and optimizer."""
    return weights_beside(actor, stage) + stage.gradients + stage.optimizer


def beside_actor(config: Config, model: PretrainedConfig, stages: list[TrainerMemory]) -> list[dict[str, int]]:
    """Bytes of other models and of weight syncs, by name, on a rank of each of the actor's `stages`.

    A reference's weights are resident while it computes log-probs; a critic's weights, gradients and optimizer always.
    With adapters the reference is their base, which critic and further adapters share. Buffers of weight syncs stay
    between them.

    Raises:
        UserError: weights cannot be sent as planned.
    """
    others = [_other_models(config, stage) for stage in stages]
    others[-1] |= logits_bytes(config, config.parallel, model, load_of(config))
    if config.method == "rl":
        for of_stage, sync in zip(others, trainer_sync(config, model), strict=True):
            if not config.cluster.gpus_per_node or sync.on_gpu:
                of_stage[staging_name(config)] = sync.staging
                of_stage |= {"copies for deltas": sync.copies} if sync.copies else {}
    return others


def peaks_of(config: Config, model: PretrainedConfig) -> list[int]:
    """Bytes of a trainer rank at its peak, with all that is beside the actor, by pipeline rank."""
    stages = memory_of(config, model)
    return totals(stages, beside_actor(config, model, stages))


def totals(stages: list[TrainerMemory], beside: list[dict[str, int]]) -> list[int]:
    """Bytes of a rank of each of the actor's stages, with all that `beside_actor` lists."""
    return [stage.total + sum(others.values()) for stage, others in zip(stages, beside, strict=True)]


def _other_models(config: Config, stage: TrainerMemory) -> dict[str, int]:
    """Bytes of the other models on a rank that holds `stage` of the actor."""
    other_models = {}
    if needs_reference(config) and not config.actor.lora.rank:
        other_models["reference"] = stage.weights
    if teacher := teacher_bytes(config, config.parallel, load_of(config)):
        other_models["teacher"] = teacher
    if needs_critic(config):
        other_models["critic"] = model_beside(config.actor, stage)
    if (format := config.server.format) is not None:  # at most: head and embedding stay as they are
        other_models["quantised weights"] = int(stage.weights // ITEM_BYTES[config.actor.dtype] * format.weight_bytes)
    if config.server.quantization_aware:  # full weights wait while passes have rounded ones
        other_models["full weights beside rounded"] = stage.weights
    if config.adapters:
        other_models["other adapters"] = (len(config.adapters) - 1) * model_beside(config.actor, stage)
    return other_models


@dataclass(frozen=True)
class Phase:
    """Bytes on a GPU that trainer and servers share, in one phase of `trainer/rollouts/shared_gpus.py`."""

    name: str
    trainer: int
    server: int

    @property
    def total(self) -> int:
        return self.trainer + self.server


def phases_of(config: Config, model: PretrainedConfig) -> list[list[Phase]]:
    """Memory of a co-located run on a GPU, phase by phase, for each pipeline stage.

    Every process keeps its CUDA context and the buffers of weight syncs.
    """
    stages, server, receiver = memory_of(config, model), synced_server_of(config, model), server_sync(config, model)
    asleep, phases = GPU_RUNTIME + receiver.gpu, []
    for stage, peak, sender in zip(stages, peaks_of(config, model), trainer_sync(config, model), strict=True):
        held, weights = GPU_RUNTIME + sender.gpu, _weights_of(config, stage)
        phases.append(
            [
                Phase("sampling", _kept_while_sampling(config, stage) + sender.gpu, server.total + GPU_RUNTIME),
                Phase("training", peak, asleep),
                Phase("syncing", weights + held + sender.digests, server.weights + asleep + receiver.digests),
            ]
        )
    return phases


def _weights_of(config: Config, stage: TrainerMemory) -> int:
    """Bytes of the trained models' weights: of actor and critic."""
    return stage.weights + (weights_beside(config.actor, stage) if needs_critic(config) else 0)


def _kept_while_sampling(config: Config, stage: TrainerMemory) -> int:
    """Bytes of the trainer that actor.offload_while_sampling leaves on the GPU."""
    engines, weights = 2 if needs_critic(config) else 1, _weights_of(config, stage)
    state = engines * (stage.gradients + stage.optimizer)
    return {"all": 0, "optimizer": weights, "none": weights + state}[config.actor.offload_while_sampling] + GPU_RUNTIME


def given_up_of(config: Config, stage: TrainerMemory) -> int:
    """Bytes on the host of the memory that a rank of a co-located run gives up. Gradients are dropped, not kept."""
    optimizer = (2 if needs_critic(config) else 1) * stage.optimizer
    kept = {"all": _weights_of(config, stage) + optimizer, "optimizer": optimizer, "none": 0}
    return kept[config.actor.offload_while_sampling]


def server_memory_of(config: Config, model: PretrainedConfig) -> ServerMemory:
    """Memory of a server rank, with the cache of `cache_of` and the slots of adapters that are sent alone."""
    tp, dtype = config.server.tp_size, server_dtype(config, model)
    memory = server_memory(model, tp, dtype, cache_of(config, model).tokens, config.server.format, cache_bytes(config))
    return replace(memory, adapters=adapter_slots(config, model))


def synced_server_of(config: Config, model: PretrainedConfig) -> ServerMemory:
    """Memory of a server rank that the trainer sends weights to, with the buffers that stay between weight syncs.

    Raises:
        UserError: weights cannot be sent as planned.
    """
    sync = server_sync(config, model)
    staging = sync.gpu if config.cluster.gpus_per_node else sync.held
    return replace(server_memory_of(config, model), staging=staging)


def adapter_slots(config: Config, model: PretrainedConfig) -> int:
    """Bytes of a server rank's slots: one for each adapter, and one for requests without; 0 if weights are merged."""
    if (adapters := adapters_on_servers(config)) is None:
        return 0
    elements = slot_elements(model, adapters.shape, config.server.tp_size)
    return (len(adapters.names) + 1) * elements * ITEM_BYTES[server_dtype(config, model)]


@dataclass(frozen=True)
class Cache:
    """KV cache of a server: bytes of a token on each rank, and its capacity in tokens."""

    token_bytes: int
    tokens: int
    share: float = 0.0  # part of the GPU's memory for weights and cache; 0: max_total_tokens is the capacity


def cache_bytes(config: Config) -> int:
    """Bytes of a number in the servers' cache; 0: as many as a weight has."""
    return 0 if config.server.kv_cache_dtype == "auto" else 1


def cache_of(config: Config, model: PretrainedConfig) -> Cache:
    """Capacity from server.max_total_tokens, else what fits into a GPU beside the weights (0 if nothing does)."""
    dtype = server_dtype(config, model)
    token = cache_token_bytes(model, config.server.tp_size, dtype, cache_bytes(config))
    if config.server.max_total_tokens or not config.cluster.gpus_per_node:
        return Cache(token, config.server.max_total_tokens)
    share = float(config.sglang.get("mem_fraction_static") or SERVER_SHARE)
    weights = server_memory(model, config.server.tp_size, dtype, 0, config.server.format).weights
    beside = max(map(partial(_kept_while_sampling, config), memory_of(config, model))) if config.server.colocate else 0
    free = share * (config.cluster.gpu_memory_gib * GIB - beside) - weights - adapter_slots(config, model)
    return Cache(token, max(0, int(free / token)), share)


@dataclass(frozen=True)
class RouteBytes:
    """Bytes of the experts that `algorithm.routing_replay` carries."""

    token: int  # of a token in a batch: int16 for each expert and layer that has some
    batch: int  # of a step's batch, on the host of every trainer rank
    device: int  # of a microbatch's tokens on a device with all layers: int64
    answer: int  # of a sequence in a server's answer: base64 of int32, of all layers; 0 if servers send none
    server: int  # of a server rank's record, on its host: int32 for each slot of the cache and all layers


def routes_of(config: Config, model: PretrainedConfig) -> RouteBytes | None:
    """Bytes of routes for sequences of full length; None without replay, or of a dense model."""
    experts, mode = decoder(model).experts, getattr(config.algorithm, "routing_replay", "off")
    if config.method != "rl" or mode == "off" or experts is None:
        return None
    batch, layers, sparse = batch_of(config), len(decoder(model).layers), sum(decoder(model).sparse)
    choices = sparse * experts.topk
    every = 4 * layers * experts.topk if mode == "rollout" else 0
    return RouteBytes(
        token=2 * choices,
        batch=2 * choices * batch.sequences * batch.longest,
        device=8 * choices * batch.max_tokens,
        answer=every * batch.longest * 4 // 3,
        server=every * cache_of(config, model).tokens,
    )


# -- disk -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes. The oldest checkpoint is removed after the newest is complete."""

    checkpoint: int
    keep: int
    export: int

    @property
    def total(self) -> int:
        return self.checkpoint * (self.keep + 1) + self.export


def disk_of(config: Config, model: PretrainedConfig) -> Disk:
    """Disk space of the checkpoints and the export.

    A checkpoint has the weights, Adam's moments and, for bfloat16, float32 main parameters
    (`actor/checkpoint/stored_state.py`).
    """
    item = ITEM_BYTES[config.actor.dtype]
    each = count_parameters(model) * (item + (MAIN if item < MAIN else 0) + MOMENTS)
    engines = 2 if needs_critic(config) else 1
    export = count_parameters(model) * item if config.saver.export_hf else 0
    return Disk(each * engines, config.saver.keep, export)
