"""Expected times of a step on GPUs, by a roofline that can be checked by hand.

    update      forward FLOPs x (3 + recomputed part) x (1 + bubble) / (ranks x peak x train_utilisation), for the
                slowest pipeline stage; with log-probs and communication in `trainer_time.py`
    prefill     forward FLOPs of the prompts, each once a server / (GPUs of a server x peak x train_utilisation)
    decode      steps x max(bytes read / (bandwidth x decode_utilisation), FLOPs / (peak x train_utilisation)), and
                two all-reduces a layer among the ranks of a server
    longest     tokens of the longest completion beyond the mean x bytes read for it alone / the same bandwidth;
                0 where servers sample ahead
    weights     bytes of the busiest rank / network_gb_s, by the plan of the sync: a floor

FLOPs are counted as the trainer counts them to balance its ranks (`actor/batch/balance.py`): 2 a weight and token,
active experts only, and attention over half of all pairs. Backward is twice forward (Kaplan et al. 2020). A decode step
of b sequences reads the weights once and every sequence's cache. For a MoE it reads the experts that b tokens are
expected to visit, E (1 - (1 - k/E)^b) of E. A weight has the bytes of `server.quantization`; products are timed at the
peak of 16 bits.

Peaks and utilisations are knobs of `cluster`. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.batch.balance import SequenceCost
from megarl.actor.sizes.memory import ITEM_BYTES
from megarl.actor.sizes.server_memory import server_memory
from megarl.algorithms import RLConfig
from megarl.config import Config
from megarl.families import decoder
from megarl.preflight.communication import Communication
from megarl.preflight.shapes import server_dtype
from megarl.preflight.sizing import cache_of
from megarl.preflight.trainer_time import TrainerTimes, trainer_times
from megarl.preflight.trainer_work import TrainerWork
from megarl.teacher_checks import teacher_servers
from megarl.trainer.batch_algebra import batch_of

SCORING = "log-probs"  # stage of the passes before an update
ALL_REDUCE_S = 1e-5  # latency of a small all-reduce within a node, in a CUDA graph. Assumed, not measured


@dataclass(frozen=True)
class StageEstimate:
    """One stage of a step: its seconds and their derivation."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True)
class StepEstimate:
    """A step in seconds and tokens/s."""

    rollout: list[StageEstimate]
    train: list[StageEstimate]
    sync: list[StageEstimate]
    overlap: bool  # servers sample the next batch while the trainer trains
    hidden_s: float  # part of the sync beside which the trainer scores the next batch
    tokens: float  # trained in a step, prompts included
    sampled: float  # completion tokens among them
    gpus: int
    under_way: int  # completions in flight on a server
    longest_s: float  # the longest completion, first to last token, with `under_way` in flight
    traffic: Communication = Communication()  # of the trainer

    @property
    def rollout_s(self) -> float:
        return sum(stage.seconds for stage in self.rollout)

    @property
    def train_s(self) -> float:
        return sum(stage.seconds for stage in self.train)

    @property
    def sync_s(self) -> float:
        return sum(stage.seconds for stage in self.sync)

    @property
    def step_s(self) -> float:
        train_s = self.train_s - self.hidden_s
        busy = max(self.rollout_s, train_s) if self.overlap else self.rollout_s + train_s
        return busy + self.sync_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def bottleneck(self) -> str:
        """The slowest side of the step."""
        sides = {"the servers": self.rollout_s, "the trainer": self.train_s, "the weight sync": self.sync_s}
        return max(sides, key=lambda name: sides[name])


def estimate_step(config: Config, model: PretrainedConfig, sync_s: float = 0.0) -> StepEstimate:
    """Estimates a step on GPUs; `sync_s` are the seconds of the planned weight sync."""
    batch, share, cost = batch_of(config), config.cluster.mean_length, SequenceCost.of(model)
    mean = share * batch.longest
    work = TrainerWork.of(config, model)
    times = times_of(config, work)
    trained, traffic = _train(config, work, times), times.communication
    teacher = teacher_servers(config)
    gpus = config.parallel.world_size() + (teacher.n_servers * teacher.tp_size if teacher is not None else 0)
    if config.method != "rl":
        return StepEstimate([], trained, [], False, 0.0, batch.sequences * mean, 0.0, gpus, 0, 0.0, traffic)
    rollout, under_way, longest_s = _rollout(config, model, cost)
    servers = config.server.n_servers * config.server.tp_size
    return StepEstimate(
        rollout=rollout,
        train=trained,
        sync=[StageEstimate("weights", sync_s, "by the plan of the sync, at the network's rate: a floor")],
        overlap=config.rollout.max_head_offpolicyness > 0,
        hidden_s=min(sync_s, times.scored_s) if config.reshard.overlap_scoring else 0.0,
        tokens=batch.sequences * mean,
        sampled=batch.sequences * share * config.gconfig.max_new_tokens,
        gpus=max(gpus, servers) if config.server.colocate else gpus + servers,
        under_way=under_way,
        longest_s=longest_s,
        traffic=traffic,
    )


def times_of(config: Config, work: TrainerWork) -> TrainerTimes:
    """Seconds of a configuration's trainer."""
    dp, actor = config.parallel.sizes()["dp_size"], config.actor
    return trainer_times(work, config.parallel, dp, actor.recompute, batch_of(config).max_tokens)


def _train(config: Config, work: TrainerWork, times: TrainerTimes) -> list[StageEstimate]:
    actor = config.actor
    again, each = work.again[actor.recompute], f"{work.forward / 1e15:.3g} PFLOP"
    bubble = f", bubble {times.bubble:.1%}" if times.bubble else ""
    stages = []
    if work.scored:
        what = f"{work.scored} x {each}: {', '.join(work.scorers)}"
        stages.append(StageEstimate(SCORING, times.scoring, what))
    how = f"{work.trained * (3 + again):.3g} x {each}{bubble}: forward, backward, {again:.2g} of forward again"
    stages.append(StageEstimate("update", times.update, how + (", policy and critic" if work.trained > 1 else "")))
    parts = times.communication.parts()
    if parts:
        text = ", ".join(f"{name} {moved.exposed:.3g} of {moved.seconds:.3g} s" for name, moved in parts.items())
        stages.append(StageEstimate("communication", times.communication.exposed, f"exposed: {text}"))
    return stages


@dataclass(frozen=True)
class DecodeSpeed:
    """Seconds of the parts of a server's decode step."""

    weights_s: float  # reads all weights but experts
    experts_s: float  # reads all experts
    missed: float  # part of the experts that one token does not visit
    cached_s: float  # reads the cache of one token
    product_s: float  # computes one token
    pair_s: float  # computes its attention to one cached token
    reduce_s: float  # latency of its all-reduces
    reduced_s: float  # moves the vector of one token in them

    def step(self, sequences: float, cached: float) -> float:
        """Seconds of a step of `sequences` completions with `cached` tokens together."""
        visited = self.experts_s * (1 - self.missed**sequences)
        read = self.weights_s + visited + cached * self.cached_s
        return max(read, sequences * self.product_s + cached * self.pair_s) + self.reduce_s + sequences * self.reduced_s


def decode_speed(config: Config, model: PretrainedConfig) -> DecodeSpeed:
    """Speed of one server, by its layout and `cluster`."""
    server, cluster, cost, shape = config.server, config.cluster, SequenceCost.of(model), decoder(model)
    dtype = server_dtype(config, model)
    weights, experts = float(server_memory(model, server.tp_size, dtype, 0, server.format).weights), 0.0
    moe = shape.experts
    if moe is not None:
        count = sum(shape.sparse) * moe.count * 3 * shape.hidden * moe.width
        each = ITEM_BYTES[dtype] if server.format is None else server.format.weight_bytes
        experts = count * each / server.tp_size
    memory = cluster.gpu_memory_gb_s * 1e9 * cluster.decode_utilisation
    compute = server.tp_size * cluster.gpu_tflops * 1e12 * cluster.train_utilisation
    reduces = 2 * model.num_hidden_layers if server.tp_size > 1 else 0
    vector = 2 * (server.tp_size - 1) / server.tp_size * model.hidden_size * ITEM_BYTES[dtype]
    return DecodeSpeed(
        weights_s=(weights - experts) / memory,
        experts_s=experts / memory,
        missed=0.0 if moe is None else 1 - moe.topk / moe.count,
        cached_s=cache_of(config, model).token_bytes / memory,
        product_s=cost.linear / compute,
        pair_s=2 * cost.quadratic / compute,
        reduce_s=reduces * ALL_REDUCE_S,
        reduced_s=reduces * vector / (cluster.node_gb_s * 1e9),
    )


def under_way_of(config: Config, model: PretrainedConfig, batches: int = 1) -> int:
    """Completions that a server has in flight at once, out of `batches` batches."""
    batch, servers, share = batch_of(config), config.server.n_servers, config.cluster.mean_length
    mean = share * ((config.train_dataset.max_length or 0) + config.gconfig.max_new_tokens)
    limits = (
        math.ceil(batches * batch.sequences / servers),
        config.rollout.max_per_server,
        config.rollout.max_connections // servers,
        int(cache_of(config, model).tokens / mean),
    )
    return max(1, min(limits))


def _rollout(config: Config, model: PretrainedConfig, cost: SequenceCost) -> tuple[list[StageEstimate], int, float]:
    """Prefill and decode of the busiest server, its completions in flight, and the seconds of the longest."""
    batch, server, cluster = batch_of(config), config.server, config.cluster
    share, speed, under_way = cluster.mean_length, decode_speed(config, model), under_way_of(config, model)
    prompt, new = share * (config.train_dataset.max_length or 0), share * config.gconfig.max_new_tokens
    step_s = speed.step(under_way, under_way * (prompt + new / 2))
    compute = server.tp_size * cluster.gpu_tflops * 1e12 * cluster.train_utilisation
    prefill = math.ceil(batch.rows / server.n_servers) * cost(math.ceil(prompt))
    steps = math.ceil(batch.sequences / server.n_servers) * new / under_way
    lone_s = speed.step(1, prompt + new)
    tail = 0.0 if config.rollout.max_head_offpolicyness else config.gconfig.max_new_tokens - new
    how = f"{steps:,.0f} steps of {step_s * 1e3:.3g} ms, {under_way} completions under way on a server"
    stages = [
        StageEstimate("prefill", prefill / compute, f"{prefill / 1e15:.3g} PFLOP a server: each prompt once"),
        StageEstimate("decode", steps * step_s, how),
        StageEstimate("longest", tail * lone_s, f"{tail:,.0f} steps of {lone_s * 1e3:.3g} ms, for the longest alone"),
    ]
    return stages, under_way, config.gconfig.max_new_tokens * step_s


def limits_rollout(config: Config, model: PretrainedConfig) -> str | None:
    """Message if a knob keeps a server below half of its cache's capacity, with the remedy; else None."""
    batch, server = batch_of(config), config.server
    if not isinstance(config.algorithm, RLConfig):
        return None
    room = int(cache_of(config, model).tokens / max(1.0, config.cluster.mean_length * batch.longest))
    possible = min(room, math.ceil(batch.sequences / server.n_servers), config.rollout.max_per_server)
    each = config.rollout.max_connections // server.n_servers
    if each >= possible / 2:
        return None
    return (
        f"rollout.max_connections={config.rollout.max_connections} over {server.n_servers} servers keeps {each} "
        f"completions under way on each, which could take {possible}; raise it to {possible * server.n_servers}"
    )
