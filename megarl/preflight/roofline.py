"""Expected times of a step on GPUs, by a roofline that can be checked by hand.

    update      forward FLOPs x (3 + recomputed part) x (1 + bubble) / (ranks x peak x train_utilisation)
    log-probs   forward FLOPs x passes x (1 + bubble) / the same
    prefill     forward FLOPs of the prompts, each once a server / (GPUs of a server x peak x train_utilisation)
    decode      steps x max(bytes read / (bandwidth x decode_utilisation), FLOPs / (peak x train_utilisation))
    longest     tokens of the longest completion beyond the mean x bytes read for it alone / the same bandwidth;
                0 where servers sample ahead
    weights     bytes of the busiest rank / network_gb_s, by the plan of the sync: a floor

FLOPs are counted as the trainer counts them to balance its ranks (`actor/batch/balance.py`): 2 a weight and token,
active experts only, and attention over half of all pairs. Backward is twice forward (Kaplan et al. 2020). A pipeline
of p stages and v virtual ones idles (p - 1) / (m v) of the time that m microbatches work (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473). A decode step of b sequences reads the weights once and every sequence's cache. For
a MoE it reads the experts that b tokens are expected to visit, E (1 - (1 - k/E)^b) of E.

Peaks and utilisations are knobs of `cluster`. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from megarl.actor.batch.balance import SequenceCost
from megarl.actor.config import backend_of
from megarl.actor.memory import ITEM_BYTES, server_memory
from megarl.algorithms import RLConfig
from megarl.config import Config
from megarl.families import moe_shape
from megarl.preflight.sizing import cache_of, needs_critic, needs_reference, server_dtype
from megarl.trainer.batch_algebra import batch_of


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
    tokens: float  # trained in a step, prompts included
    sampled: float  # completion tokens among them
    gpus: int
    under_way: int  # completions in flight on a server
    longest_s: float  # the longest completion from first to last token, at that many

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
        busy = max(self.rollout_s, self.train_s) if self.overlap else self.rollout_s + self.train_s
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
    trained = _train(config, model, cost, mean)
    gpus = config.parallel.world_size()
    if config.method != "rl":
        return StepEstimate([], trained, [], False, batch.sequences * mean, 0.0, gpus, 0, 0.0)
    rollout, under_way, longest_s = _rollout(config, model, cost)
    servers = config.server.n_servers * config.server.tp_size
    return StepEstimate(
        rollout=rollout,
        train=trained,
        sync=[StageEstimate("weights", sync_s, "by the plan of the sync, at the network's rate: a floor")],
        overlap=config.rollout.max_head_offpolicyness > 0,
        tokens=batch.sequences * mean,
        sampled=batch.sequences * share * config.gconfig.max_new_tokens,
        gpus=max(gpus, servers) if config.server.colocate else gpus + servers,
        under_way=under_way,
        longest_s=longest_s,
    )


def _train(config: Config, model: PretrainedConfig, cost: SequenceCost, mean: float) -> list[StageEstimate]:
    batch, parallel = batch_of(config), config.parallel
    rate = parallel.world_size() * config.cluster.gpu_tflops * 1e12 * config.cluster.train_utilisation
    forward = batch.sequences * cost(math.ceil(mean))
    per_update = max(1, math.ceil(batch.per_replica * mean / batch.max_tokens))
    again = {"none": 0.0, "selective": _computed_again(config, model, cost, mean), "full": 1.0}[config.actor.recompute]

    def stage(name: str, passes: float, microbatches: int, how: str) -> StageEstimate:
        bubble = (parallel.pp_size - 1) / (microbatches * parallel.vpp_size)
        text = f"{passes:.3g} x {forward / 1e15:.3g} PFLOP" + (f", bubble {bubble:.1%}" if bubble else "")
        return StageEstimate(name, forward * passes * (1 + bubble) / rate, f"{text}: {how}")

    update = stage("update", 3 + again, per_update, f"forward, backward, {again:.2g} of forward again")
    stages = [update]
    scored = {"policy": config.method == "rl", "reference": needs_reference(config), "critic": needs_critic(config)}
    if passes := sum(scored.values()):
        who = ", ".join(name for name, is_there in scored.items() if is_there)
        stages.insert(0, stage("log-probs", passes, per_update * batch.minibatches, who))
    if needs_critic(config):
        stages.append(stage("critic", 3 + again, per_update, "its update"))
    return stages


def _computed_again(config: Config, model: PretrainedConfig, cost: SequenceCost, mean: float) -> float:
    """Part of forward that recompute=selective repeats.

    Transformer Engine's layers repeat experts, and no product of a dense model. The others repeat MLPs or experts, and
    the attention core.
    """
    without = copy.deepcopy(model)
    without.intermediate_size = without.moe_intermediate_size = 0
    mlp = cost.linear - SequenceCost.of(without).linear
    on_gpu = config.cluster.gpus_per_node > 0
    attention = cost.quadratic * mean * mean
    if backend_of(config.actor, has_gpu=on_gpu, has_te=on_gpu) == "te":
        mlp, attention = (mlp if moe_shape(model) else 0.0), 0.0
    return (mlp * mean + attention) / cost(math.ceil(mean))


def _rollout(config: Config, model: PretrainedConfig, cost: SequenceCost) -> tuple[list[StageEstimate], int, float]:
    """Prefill and decode of the busiest server, its completions in flight, and the seconds of the longest."""
    batch, server, cluster = batch_of(config), config.server, config.cluster
    share, cache = cluster.mean_length, cache_of(config, model)
    prompt, new = share * (config.train_dataset.max_length or 0), share * config.gconfig.max_new_tokens
    completions = math.ceil(batch.sequences / server.n_servers)
    limits = (
        completions,
        config.rollout.max_per_server,
        config.rollout.max_connections // server.n_servers,
        int(cache.tokens / (prompt + new)),
    )
    under_way = max(1, min(limits))
    compute = server.tp_size * cluster.gpu_tflops * 1e12 * cluster.train_utilisation
    memory = cluster.gpu_memory_gb_s * 1e9 * cluster.decode_utilisation
    step_s = max(
        _bytes_read(config, model, under_way, (prompt + new / 2) * cache.token_bytes) / memory,
        under_way * (cost.linear + 2 * cost.quadratic * (prompt + new / 2)) / compute,
    )
    prefill = math.ceil(batch.rows / server.n_servers) * cost(math.ceil(prompt))
    steps = completions * new / under_way
    lone_s = _bytes_read(config, model, 1, (prompt + new) * cache.token_bytes) / memory
    tail = 0.0 if config.rollout.max_head_offpolicyness else config.gconfig.max_new_tokens - new
    how = f"{steps:,.0f} steps of {step_s * 1e3:.3g} ms, {under_way} completions under way on a server"
    stages = [
        StageEstimate("prefill", prefill / compute, f"{prefill / 1e15:.3g} PFLOP a server: each prompt once"),
        StageEstimate("decode", steps * step_s, how),
        StageEstimate("longest", tail * lone_s, f"{tail:,.0f} steps of {lone_s * 1e3:.3g} ms, for the longest alone"),
    ]
    return stages, under_way, config.gconfig.max_new_tokens * step_s


def _bytes_read(config: Config, model: PretrainedConfig, sequences: int, cache_bytes: float) -> float:
    """Bytes that a server rank reads in one decode step; `cache_bytes` is the cache of one sequence."""
    dtype = server_dtype(config, model)
    weights = float(server_memory(model, config.server.tp_size, dtype, 0).weights)
    if (moe := moe_shape(model)) is not None:
        experts = sum(moe.layers) * moe.experts * 3 * model.hidden_size * moe.width
        visited = 1 - (1 - moe.topk / moe.experts) ** sequences
        weights -= experts * ITEM_BYTES[dtype] / config.server.tp_size * (1 - visited)
    return weights + sequences * cache_bytes


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
