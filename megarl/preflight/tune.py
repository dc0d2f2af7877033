"""Proposes layouts of trainer and servers with the shortest expected steps that a number of GPUs' memory holds.

python -m megarl.preflight tune +experiment=NAME [gpus=N] [group=name ...] [knob=value ...]

Searches tp, pp, vpp, cp, dp and ep of the trainer, tp_comm_overlap, recompute, tokens of a microbatch, and number and
tp of the servers. Proposals overlap gradients and parameters (`parallel.overlap`), as GPUs do by default.
Times come from `roofline.py` and memory from `actor/sizes/memory.py`. A proposal is as good as they are: a starting
point to measure. The weight sync counts with its least time instead of its plan. Batch, algorithm and lengths
stay as they are. The search is exhaustive and has no random numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig

from megarl.actor.checks import check_layout
from megarl.actor.config import RECOMPUTE
from megarl.actor.gpu import userbuffers
from megarl.actor.sizes.memory import StepLoad, trainer_memory
from megarl.actor.sizes.parameter_counts import RankParameters, rank_parameters
from megarl.checks import failures
from megarl.config import Config, longest_sequence
from megarl.families import decoder
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.launcher.slurm import plan_of
from megarl.parallel.config import MAX_RANKS, ParallelConfig
from megarl.preflight.findings import ROOMY, findings
from megarl.preflight.roofline import StepEstimate, estimate_step
from megarl.preflight.shapes import teacher_of
from megarl.preflight.sizing import (
    GIB,
    logits_bytes,
    model_beside,
    needs_critic,
    needs_reference,
    peaks_of,
    server_memory_of,
    size,
    teacher_bytes,
)
from megarl.preflight.trainer_time import trainer_times
from megarl.preflight.trainer_work import TrainerWork, is_te
from megarl.reshard.transfer.transports import MESSAGE_TRANSPORTS, largest_bucket
from megarl.reshard.transfer.transports.base import SLOTS
from megarl.trainer.batch_algebra import BatchAlgebra, batch_of

BEST = 5
SIZES = (1, 2, 4, 8, 16)  # of tp and cp, and microbatches in sequences of full length
MAX_STAGES = 16
MAX_VIRTUAL = 8  # of vpp
PER_WORLD = 8  # layouts kept for each number of trainer ranks
TRIED = 60  # proposals that preflight's findings may refuse
CHOSEN = {
    "parallel": (
        "tp_size",
        "pp_size",
        "vpp_size",
        "cp_size",
        "dp_size",
        "ep_size",
        "etp_size",
        "sequence_parallel",
        "overlap",
        "tp_comm_overlap",
        "first_stage_layers",
        "last_stage_layers",
    ),
    "actor": ("recompute", "max_tokens_per_mb"),
    "server": ("n_servers", "tp_size"),
}


@dataclass(frozen=True)
class Layout:
    """A trainer's layout with its expected seconds a step."""

    parallel: ParallelConfig
    recompute: str
    max_tokens: int
    seconds: float
    memory: int  # bytes of the fullest rank, without weight syncs

    @property
    def ranks(self) -> int:
        parallel = self.parallel
        return parallel.tp_size * parallel.pp_size * parallel.cp_size * (parallel.dp_size or 1)

    @property
    def order(self) -> tuple[float, int, int, int, int, int, bool]:
        """Quickest first; of equal ones the smaller in memory, then the simpler."""
        at = self.parallel
        sizes = at.pp_size, at.vpp_size, at.cp_size, at.tp_size
        return _rounded(self.seconds), self.memory, *sizes, at.tp_comm_overlap


@dataclass(frozen=True)
class Proposal:
    """A run's layout: the configuration with it, its expected step and the bytes of a trainer GPU."""

    config: Config
    step: StepEstimate
    memory: int

    def overrides(self, base: Config) -> str:
        """Command-line overrides that turn `base` into this layout."""
        pairs = []
        for group in ("parallel", "actor", "server"):
            ours, theirs = getattr(self.config, group), getattr(base, group)
            default = type(ours)()
            for name in CHOSEN[group]:
                value = getattr(ours, name)
                if value != getattr(default, name) or value != getattr(theirs, name):
                    pairs.append(f"{group}.{name}={str(value).lower()}")
        return " ".join(pairs if self.config.method == "rl" else [p for p in pairs if not p.startswith("server")])


def propose(config: Config, model: PretrainedConfig, folder: Path, gpus: int) -> list[Proposal]:
    """The best layouts of `config` on `gpus` GPUs that preflight does not refuse, quickest first.

    Raises:
        UserError: no layout fits.
    """
    options = heapq.nsmallest(TRIED, _combined(config, model, gpus), key=lambda option: option[0])
    planned = (_planned(config, layout, servers) for _, layout, servers in options)
    accepted = (run for run in planned if not any(f.stops for f in findings(run, model, folder)))
    weighed = ((run, max(peaks_of(run, model))) for run in accepted)
    fitting = ((run, memory) for run, memory in weighed if memory <= ROOMY * config.cluster.gpu_memory_gib * GIB)
    best = [Proposal(run, estimate(run, model), memory) for run, memory in itertools.islice(fitting, BEST)]
    if not best:
        raise UserError(
            f"gpus={gpus}: no layout of {config.actor.path} with server.dtype={config.server.dtype} fits "
            f"cluster.gpu_memory_gib={config.cluster.gpu_memory_gib:g}; give more GPUs, or set actor.dtype=bfloat16 "
            "and actor.offload_optimizer=true"
        )
    return sorted(best, key=lambda proposal: _rounded(proposal.step.step_s))


def estimate(config: Config, model: PretrainedConfig) -> StepEstimate:
    """Expected step, with the least time of a weight sync: each server rank receives what it holds."""
    if config.method != "rl":
        return estimate_step(config, model)
    machines, held = machines_of(config), server_memory_of(config, model).weights
    sent = held * config.server.n_servers * config.server.tp_size / config.parallel.world_size()
    link = config.cluster.node_gb_s if machines.nodes == 1 else config.cluster.network_gb_s
    return estimate_step(config, model, max(held, sent) / (link * 1e9))


def gpus_of(config: Config) -> int:
    """GPUs that a configuration uses."""
    machines = machines_of(config)
    servers, teacher = machines.servers * machines.server_tp, machines.teachers * machines.teacher_tp
    return max(machines.trainers, servers) if machines.colocate else machines.trainers + servers + teacher


# -- the search -------------------------------------------------------------------------------------------------------

Servers = tuple[int, int]  # number, tp
Option = tuple[tuple[float, int, int, int, int, int, bool, int], Layout, Servers]


def _combined(config: Config, model: PretrainedConfig, gpus: int) -> Iterator[Option]:
    """Yields trainer layouts with the servers that the other GPUs hold, each with its order."""
    by_ranks: dict[int, list[Layout]] = {}
    for layout in _layouts(config, model, gpus):
        by_ranks.setdefault(layout.ranks, []).append(layout)
    rollout_s: dict[Servers, float] = {}
    sizes = _server_sizes(config, model)
    for ranks, layouts in by_ranks.items():
        best = heapq.nsmallest(PER_WORLD, layouts, key=lambda layout: layout.order)
        for servers in _servers(config, sizes, gpus, ranks):
            if servers not in rollout_s:
                rollout_s[servers] = estimate(_with_servers(config, servers), model).rollout_s if servers[0] else 0.0
            sampling = rollout_s[servers]
            for layout in best:
                overlap = config.rollout.max_head_offpolicyness > 0
                seconds = max(sampling, layout.seconds) if overlap else sampling + layout.seconds
                yield (_rounded(seconds), *layout.order[1:], servers[1]), layout, servers


def _server_sizes(config: Config, model: PretrainedConfig) -> list[int]:
    """Values of server.tp_size whose weights leave room."""
    if config.method != "rl":
        return []
    limit = ROOMY * config.cluster.gpu_memory_gib * GIB
    fitting = (n for n in SIZES if n <= config.cluster.gpus_per_node and model.num_attention_heads % n == 0)
    return [tp for tp in fitting if server_memory_of(_with_servers(config, (1, tp)), model).weights <= limit]


def _servers(config: Config, sizes: list[int], gpus: int, ranks: int) -> Iterator[Servers]:
    """Yields, by tp, as many servers as `gpus` hold beside `ranks` trainers."""
    if config.method != "rl":
        yield 0, 1
    nodes = math.ceil(gpus / config.cluster.gpus_per_node)
    for tp in sizes:
        for count in range((gpus if config.server.colocate else gpus - ranks) // tp, 0, -1):
            placed = replace(_with_servers(config, (count, tp)), parallel=ParallelConfig(dp_size=ranks))
            if machines_of(placed).nodes <= nodes and not failures([partial(plan_of, placed)]):
                yield count, tp
                break


@dataclass(frozen=True)
class Search:
    """Facts of a run that all its layouts share, and their memory."""

    config: Config
    work: TrainerWork
    batch: BatchAlgebra
    reference: bool
    critic: bool
    limit: int  # bytes of a GPU, less the largest staging of weight syncs

    @staticmethod
    def of(config: Config, model: PretrainedConfig) -> Search:
        staging = SLOTS * (config.reshard.bucket_bytes or largest_bucket(MESSAGE_TRANSPORTS))
        limit = int(ROOMY * config.cluster.gpu_memory_gib * GIB) - staging * (config.method == "rl")
        others = needs_reference(config) and not config.actor.lora.rank, needs_critic(config)
        return Search(config, TrainerWork.of(config, model), batch_of(config), *others, limit)

    def memory(
        self, parallel: ParallelConfig, recompute: str, max_tokens: int, counts: dict[int, RankParameters]
    ) -> int:
        """Bytes of the fullest of the ranks in `counts`, with the models beside the actor."""
        dp = parallel.dp_size or 1
        batch = replace(self.batch, dp=dp, max_tokens=max_tokens, longest=min(self.batch.longest, max_tokens))
        load = StepLoad(min(max_tokens, batch.per_replica * batch.longest), batch.microbatches)
        actor = replace(self.config.actor, recompute=recompute, max_tokens_per_mb=max_tokens)
        totals = []
        for rank, count in counts.items():
            stage = trainer_memory(self.work.model, parallel, actor, load, rank, on_gpu=True, parameters=count)
            others = self.critic * model_beside(actor, stage) + self.reference * stage.weights
            others += teacher_bytes(self.config, parallel, load)
            if rank == parallel.pp_size - 1:
                others += sum(logits_bytes(self.config, parallel, self.work.model, load).values())
            totals.append(stage.total + others)
        return max(totals)


def _layouts(config: Config, model: PretrainedConfig, gpus: int) -> Iterator[Layout]:
    """Yields every trainer layout on at most `gpus` ranks that fits, with its best recompute and microbatch."""
    search, teacher = Search.of(config, model), teacher_of(config)
    whole = config.actor.shared_prefix  # sequences stay on one rank
    unit = search.batch.per_update if config.method == "rl" else search.batch.rows  # `checks.py`: divided by dp_size
    replicas = [n for n in range(1, gpus + 1) if unit % n == 0]
    for tp, pp in itertools.product(SIZES, range(1, MAX_STAGES + 1)):
        base = _stages(model, tp, pp, not whole) if tp <= config.cluster.gpus_per_node else None
        if base is None:
            continue
        ranks = {0, min(1, pp - 1), pp - 1}
        for made in _variants(config, base, model.num_hidden_layers):
            if teacher is not None and failures([partial(check_layout, teacher, made)]):
                continue
            counts = {rank: rank_parameters(model, made, rank, search.work.adapters) for rank in ranks}
            cuts = SIZES[:1] if whole or made.tp_comm_overlap else SIZES[:-1]
            for cp, dp in itertools.product(cuts, replicas):
                if tp * pp * cp * dp > min(gpus, MAX_RANKS):
                    continue
                for ep in _expert_sizes(search.work, tp * cp * dp):
                    parallel = replace(made, cp_size=cp, dp_size=dp, ep_size=ep)
                    shared = {rank: count.spread(ep) for rank, count in counts.items()}
                    if (layout := _fitting(search, parallel, shared)) is not None:
                        yield layout


def _variants(config: Config, base: ParallelConfig, layers: int) -> Iterator[ParallelConfig]:
    """Yields `base` with each number of virtual stages that divides every stage's layers, and with userbuffers."""
    counts = [sum(map(len, stage)) for stage in base.stage_layers(layers)]
    most = 1 if base.pp_size == 1 else min(MAX_VIRTUAL, *counts)
    for vpp in (n for n in range(1, most + 1) if math.gcd(*counts) % n == 0):
        made = replace(base, vpp_size=vpp)
        yield made
        if base.sequence_parallel and is_te(config):
            pieces = replace(made, tp_comm_overlap=True)
            if not failures([partial(userbuffers.check_knobs, config.actor, pieces, config.deterministic)]):
                yield pieces


def _fitting(search: Search, parallel: ParallelConfig, counts: dict[int, RankParameters]) -> Layout | None:
    """The quickest recompute and microbatch that leave room; None if none does."""
    sizes = _microbatches(search.config)
    if search.memory(parallel, RECOMPUTE[-1], sizes[0], counts) > search.limit:
        return None
    options = []
    for recompute, max_tokens in itertools.product(RECOMPUTE, sizes):
        times = trainer_times(search.work, parallel, parallel.dp_size or 1, recompute, max_tokens, counts[0])
        options.append((_rounded(times.total), -max_tokens, RECOMPUTE.index(recompute), times.total))
    for _, negated, mode, seconds in sorted(options):
        max_tokens = -negated  # of equally quick ones the largest, which launches least
        if (memory := search.memory(parallel, RECOMPUTE[mode], max_tokens, counts)) <= search.limit:
            return Layout(parallel, RECOMPUTE[mode], max_tokens, seconds, memory)
    return None


def _microbatches(config: Config) -> list[int]:
    """Limits of tokens to try: multiples of a sequence of full length, and the configured one."""
    unit = (longest_sequence(config) or config.actor.max_tokens_per_mb) * batch_of(config).together
    if config.method == "rl":
        unit = max(unit, (config.valid_dataset.max_length or 0) + config.gconfig.max_new_tokens)
    own = config.actor.max_tokens_per_mb
    return sorted({unit * count for count in SIZES} | ({own} if own >= unit else set()))


def _stages(model: PretrainedConfig, tp: int, pp: int, sequence_parallel: bool) -> ParallelConfig | None:
    """Stages with even layers, or with fewer at both ends, which also hold the vocabulary; None if there are none."""
    layers = model.num_hidden_layers
    inner = math.ceil(layers / pp)
    ends = (layers - (pp - 2) * inner) // 2 if pp > 2 and layers % pp else 0
    if ends < 0 or (layers % pp and (pp <= 2 or ends < 1 or 2 * ends + (pp - 2) * inner != layers)):
        return None
    parallel = ParallelConfig(
        tp_size=tp,
        pp_size=pp,
        dp_size=1,
        etp_size=None if decoder(model).experts is None else 1,
        sequence_parallel=tp > 1 and sequence_parallel,
        first_stage_layers=ends,
        last_stage_layers=ends,
    )
    return None if failures([partial(check_layout, model, parallel)]) else parallel


def _expert_sizes(work: TrainerWork, per_stage: int) -> list[int]:
    experts = work.shape.experts
    if experts is None:
        return [1]
    return [ep for ep in range(1, experts.count + 1) if experts.count % ep == 0 and per_stage % ep == 0]


def _with_servers(config: Config, servers: Servers) -> Config:
    return replace(config, server=replace(config.server, n_servers=servers[0], tp_size=servers[1]))


def _planned(config: Config, layout: Layout, servers: Servers) -> Config:
    actor = replace(config.actor, recompute=layout.recompute, max_tokens_per_mb=layout.max_tokens)
    planned = replace(config, parallel=replace(layout.parallel, timeout_s=config.parallel.timeout_s), actor=actor)
    return _with_servers(planned, servers) if servers[0] else planned


def _rounded(seconds: float) -> float:
    """Three digits: layouts that differ by less are equal, and memory decides."""
    return float(f"{seconds:.3g}")


# -- the command ------------------------------------------------------------------------------------------------------


def tune(config: Config, model: PretrainedConfig, folder: Path, gpus: int | None, console: Console) -> int:
    """Prints the best layouts beside the configured one, each with its overrides. Returns the exit code.

    Raises:
        UserError: the run is planned for CPUs, or nothing fits.
    """
    if not config.cluster.gpus_per_node:
        raise UserError("tune needs a plan for GPUs: set cluster.gpus_per_node and the other knobs of cluster")
    count = gpus_of(config) if gpus is None else gpus
    proposals = propose(config, model, folder, count)
    table = Table(title=f"Layouts on {count} GPUs", title_justify="left", title_style="bold")
    for name in ("", "trainer", "recompute", "tokens", "servers", "memory", "trainer", "servers", "weights", "a step"):
        table.add_column(name, justify="left" if name in ("", "trainer") else "right")
    for number, proposal in enumerate(proposals, 1):
        table.add_row(str(number), *_cells(proposal.config, proposal.step, proposal.memory))
    own = max(peaks_of(config, model))
    table.add_section()
    table.add_row(f"given, {gpus_of(config)} GPUs", *_cells(config, estimate(config, model), own))
    table.caption = "a roofline, not measured; the trainer's memory per GPU, tokens of a microbatch, seconds"
    table.caption_justify = "left"
    console.print(table)
    for number, proposal in enumerate(proposals, 1):
        print(f"{number}  {proposal.overrides(config)}")
    return 0


def _cells(config: Config, step: StepEstimate, memory: int) -> list[str]:
    parallel, server = config.parallel, config.server
    sizes = {"tp": parallel.tp_size, "pp": parallel.pp_size, "vpp": parallel.vpp_size, "cp": parallel.cp_size}
    sizes |= {"dp": parallel.sizes()["dp_size"], "ep": parallel.ep_size}
    layout = " ".join(f"{name}{count}" for name, count in sizes.items() if count > 1) or "one GPU"
    layout += " ub" if parallel.tp_comm_overlap else ""
    servers = f"{server.n_servers} x tp{server.tp_size}" if config.method == "rl" else "-"
    seconds = (step.train_s, step.rollout_s, step.sync_s, step.step_s)
    return [
        layout,
        config.actor.recompute,
        f"{config.actor.max_tokens_per_mb:,}",
        servers,
        size(memory),
        *(f"{value:.1f}" for value in seconds),
    ]
