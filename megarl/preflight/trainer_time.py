"""Seconds of the trainer's passes by layout: compute, pipeline bubble and communication.

    compute     FLOPs of the slowest stage / (peak x train_utilisation); at least LAYER_LAUNCH_S a layer and microbatch,
                and the time to read a microbatch's weights and, in backward, to add to its float32 gradients
    bubble      (p - 1) / (m v) of it: p stages, v virtual ones, m microbatches (Narayanan et al. 2021,
                https://arxiv.org/abs/2104.04473)
    tp          4 all-gathers or reduce-scatters of a layer's activations, 2 where the MLP is a mixture of experts
    cp          keys and values of the other ranks, a layer
    ep          a token's hidden vector to each of its experts and back, a layer
    pp          a microbatch's activations to the next stage, each exchange with EXCHANGE_S
    dp          gradients in float32 to their shard and parameters from it, an optimizer step

A collective over n ranks moves (n - 1) / n of the data (ring), and starts in COLLECTIVE_S. It takes `cluster.node_gb_s`
where its ranks fit a node and `cluster.network_gb_s` where they do not. Forward communicates once, backward once (cp
twice), and recomputation repeats forward's part. All of it counts as exposed: nothing here hides communication behind
compute. Expected loads are even: the trainer balances its ranks, and experts are assumed to be balanced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.batch.balance import SequenceCost
from megarl.actor.config import backend_of
from megarl.actor.memory import GRADIENT, ITEM_BYTES
from megarl.actor.parameter_counts import RankParameters, rank_parameters
from megarl.algorithms import OPDConfig
from megarl.config import ClusterConfig, Config
from megarl.families import decoder
from megarl.families.blocks import Decoder
from megarl.parallel.config import ParallelConfig
from megarl.preflight.shapes import teacher_of
from megarl.preflight.sizing import needs_critic, needs_reference
from megarl.trainer.batch_algebra import batch_of

# Assumed, not measured:
LAYER_LAUNCH_S = 1e-4  # forward of one layer: about 25 kernels, launched in 4 us each
COLLECTIVE_S = 2e-5  # start of one collective
EXCHANGE_S = 2e-4  # an exchange between stages, for whose shapes and end the host waits


@dataclass(frozen=True)
class Communication:
    """Seconds of a step that a rank spends in collectives, by dimension of the layout."""

    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    pp: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        return self.tp + self.cp + self.ep + self.pp + self.dp


@dataclass(frozen=True)
class TrainerTimes:
    """Seconds of a step on the trainer; `update` and `scoring` are compute with its bubble."""

    update: float  # of policy and critic
    scoring: float  # log-probs and values before the update
    bubble: float  # of an update, relative to its compute
    communication: Communication

    @property
    def total(self) -> float:
        return self.update + self.scoring + self.communication.total


@dataclass(frozen=True)
class TrainerWork:
    """Work of a step, independent of the layout."""

    model: PretrainedConfig
    shape: Decoder
    cluster: ClusterConfig
    sequences: int
    together: int  # sequences that are never parted
    minibatches: int
    mean: float  # tokens of a sequence
    forward: float  # FLOPs of one pass over all sequences
    head: float  # part of them in the LM head
    scorers: tuple[str, ...]  # models with a pass that only computes log-probs or values
    trained: int  # models that are updated: policy, critic
    again: dict[str, float]  # part of forward that backward repeats, by recompute mode
    item: int  # bytes of an activation
    teacher: float = 0.0  # FLOPs of a frozen teacher's pass, and of the divergence from it

    @property
    def scored(self) -> int:
        return len(self.scorers)

    @staticmethod
    def of(config: Config, model: PretrainedConfig) -> TrainerWork:
        batch, cost = batch_of(config), SequenceCost.of(model)
        mean = config.cluster.mean_length * batch.longest
        each = cost(math.ceil(mean))
        critic = needs_critic(config)
        scores = {"policy": config.method == "rl", "reference": needs_reference(config), "critic": critic}
        return TrainerWork(
            model=model,
            shape=decoder(model),
            cluster=config.cluster,
            sequences=batch.sequences,
            together=batch.together,
            minibatches=batch.minibatches,
            mean=mean,
            forward=batch.sequences * each,
            head=2.0 * model.hidden_size * model.vocab_size * mean / each,
            scorers=tuple(name for name, is_there in scores.items() if is_there),
            trained=1 + critic,
            again={"none": 0.0, "selective": computed_again(config, model, cost, mean), "full": 1.0},
            item=ITEM_BYTES[config.actor.dtype],
            teacher=teacher_work(config, model, batch.sequences, mean),
        )


def teacher_work(config: Config, model: PretrainedConfig, sequences: int, mean: float) -> float:
    """FLOPs of a teacher's forward pass over all sequences of `mean` tokens; 0 without one.

    divergence=full computes the logits of both models twice more than that, in forward and in backward, where the
    student's own loss does it once.
    """
    teacher = teacher_of(config)
    if teacher is None or not isinstance(config.algorithm, OPDConfig):
        return 0.0
    heads = 2.0 * mean * (2 * teacher.hidden_size * teacher.vocab_size + model.hidden_size * model.vocab_size)
    full = config.algorithm.divergence == "full"
    return sequences * (SequenceCost.of(teacher)(math.ceil(mean)) + full * heads)


def computed_again(config: Config, model: PretrainedConfig, cost: SequenceCost, mean: float) -> float:
    """Part of forward that recompute=selective repeats.

    Transformer Engine's layers repeat experts, and no product of a dense model. The others repeat MLPs or experts, and
    the attention core.
    """
    shape = decoder(model)
    mlp = 2.0 * sum(layer.mlp.active_elements(shape.hidden) for layer in shape.layers)
    on_gpu = config.cluster.gpus_per_node > 0
    attention = cost.quadratic * mean * mean
    if backend_of(config.actor, has_gpu=on_gpu, has_te=on_gpu) == "te":
        mlp, attention = (mlp if shape.experts else 0.0), 0.0
    return (mlp * mean + attention) / cost(math.ceil(mean))


def trainer_times(
    work: TrainerWork,
    parallel: ParallelConfig,
    dp: int,
    recompute: str,
    max_tokens: int,
    parameters: RankParameters | None = None,
) -> TrainerTimes:
    """Estimates a step. `dp` is the resolved dp_size; `parameters`: pipeline rank 0's, if counted before."""
    pp, vpp = parallel.pp_size, parallel.vpp_size
    ranks = parallel.tp_size * pp * parallel.cp_size * dp
    per_replica = math.ceil(work.sequences / work.minibatches / work.together / dp) * work.together
    per_update = max(1, math.ceil(per_replica * work.mean / max_tokens))
    count = work.minibatches * per_update
    layers = [sum(map(len, stage)) for stage in parallel.stage_layers(work.model.num_hidden_layers)]
    layer = (1 - work.head) / sum(layers)
    slowest = max(part * layer + (work.head if rank == pp - 1 else 0.0) for rank, part in enumerate(layers)) * pp
    parameters = parameters or rank_parameters(work.model, parallel, 0)
    rate = ranks * work.cluster.gpu_tflops * 1e12 * work.cluster.train_utilisation
    compute, launch = work.forward * slowest / rate, count * max(layers) * LAYER_LAUNCH_S
    each = float(count * (parameters.dense + parameters.experts))
    each /= work.cluster.gpu_memory_gb_s * 1e9 * work.cluster.decode_utilisation
    forward = max(compute, launch, each * work.item)
    frozen = parameters.trained_dense < parameters.dense  # adapters: no gradients of the weights
    backward = max((1 if frozen else 2) * compute, 2 * launch, each * (work.item + (0 if frozen else 2 * GRADIENT)))
    bubble = (pp - 1) / (per_update * vpp)
    return TrainerTimes(
        update=work.trained * (forward * (1 + work.again[recompute]) + backward) * (1 + bubble),
        scoring=(work.scored * forward + work.teacher / rate) * (1 + (pp - 1) / (count * vpp)),
        bubble=bubble,
        communication=_communication(work, parallel, dp, recompute, count * max(layers), max(layers), parameters),
    )


def _communication(
    work: TrainerWork,
    parallel: ParallelConfig,
    dp: int,
    recompute: str,
    visits: int,
    layers: int,
    parameters: RankParameters,
) -> Communication:
    """Seconds in collectives of a rank with `layers` layers and `parameters`; `visits`: layers x microbatches."""
    tp, cp, pp = parallel.tp_size, parallel.cp_size, parallel.pp_size
    per_stage, hidden, moe = tp * cp * dp, work.shape.hidden, work.shape.experts
    tokens = work.sequences * work.mean / dp / cp  # of a step, on each rank before tp splits them
    repeated = {"none": 0.0, "selective": 0.5 * (work.again["selective"] > 0), "full": 1.0}[recompute]  # the MLP's half
    passes = work.scored + work.trained * (2 + repeated)
    vector = hidden * work.item
    inside = 2 if moe is not None and parallel.expert_tp_size == 1 else 4
    keys = 2 * max(1.0, work.shape.attention.kv_heads / tp) * work.shape.attention.head_dim * work.item
    sent = vector / (tp if parallel.sequence_parallel else 1)
    replicas, expert_replicas = cp * dp, max(1, per_stage // (parallel.expert_tp_size * parallel.ep_size))
    synced = _ring(replicas) * parameters.dense + _ring(expert_replicas) * parameters.experts
    start = COLLECTIVE_S * visits
    routed = (work.scored + work.trained * (2 + (repeated > 0))) * (parallel.ep_size > 1 or parallel.expert_tp_size > 1)
    return Communication(
        tp=passes * inside * min(1, tp - 1) * (start + layers * _ring(tp) * tokens * vector / _link(work.cluster, tp)),
        cp=(passes + work.trained) * (cp - 1) * (start + layers * tokens * keys / _link(work.cluster, tp * cp)),
        ep=routed * (2 * start + _experts(work, parallel, layers, tokens)) if moe is not None else 0.0,
        pp=(work.scored + 2 * work.trained) * parallel.vpp_size * min(1, pp - 1)
        * (visits / layers * EXCHANGE_S + tokens * sent / _link(work.cluster, per_stage * pp)),
        dp=work.trained * work.minibatches * synced * (GRADIENT + work.item) / _link(work.cluster, per_stage),
    )  # fmt: skip


def _experts(work: TrainerWork, parallel: ParallelConfig, layers: int, tokens: float) -> float:
    """Seconds of the all-to-alls of one pass, and of the experts' own tensor parallelism."""
    moe, per_node = work.shape.experts, max(1, work.cluster.gpus_per_node)
    if moe is None:
        return 0.0
    ep, etp = parallel.ep_size, parallel.expert_tp_size
    sparse = work.shape.sparse
    ours = tokens / parallel.tp_size * moe.topk * work.shape.hidden * work.item * sum(sparse) / len(sparse)
    near = min(1.0, per_node / (ep * etp))  # part of the group on the rank's own node
    node, network = work.cluster.node_gb_s * 1e9, work.cluster.network_gb_s * 1e9
    moved = 2 * ours * layers * _ring(ep)
    gathered = 2 * ours * layers * (etp - 1) / _link(work.cluster, etp)
    return max(moved * near / node, moved * (1 - near) / network) + gathered


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


def _link(cluster: ClusterConfig, ranks: int) -> float:
    """Bytes/s each way between `ranks` neighbours."""
    return (cluster.node_gb_s if ranks <= max(1, cluster.gpus_per_node) else cluster.network_gb_s) * 1e9
