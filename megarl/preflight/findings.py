"""Problems and notes about a planned run, each one line with its remedy.

The rules that a run enforces itself are in `megarl/checks.py`. Here are those about memory, times and machines, which
only a plan can tell. Nothing here needs a GPU, a process group or the network.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
from transformers import PretrainedConfig

from megarl.actor.config import RECOMPUTE
from megarl.actor.sizes.memory import GPU_RUNTIME
from megarl.actor.sizes.server_memory import ServerMemory
from megarl.checks import Check, config_checks, failures, length_checks, model_checks, server_checks, size_checks
from megarl.config import Config, longest_sequence
from megarl.preflight.planned_places import planned_names
from megarl.preflight.planned_sync import staging_name
from megarl.preflight.roofline import estimate_step, limits_rollout
from megarl.preflight.shapes import served_teacher_of, server_dtype, teacher_of
from megarl.preflight.sizing import (
    GIB,
    beside_actor,
    cache_of,
    memory_of,
    peaks_of,
    phases_of,
    server_memory_of,
    size,
    synced_server_of,
    totals,
)
from megarl.teacher_checks import check_teacher_model, teacher_servers

LOPSIDED = 3.0  # ratio of the two sides' times from which a note is made
ROOMY = 0.85  # part of a GPU that a proposed recompute mode may fill: estimates err
FULL = 0.95  # usable part of a device's memory; allocators leave holes
REMEDY = (
    "lower actor.max_tokens_per_mb, set actor.recompute=full or actor.dtype=bfloat16, or raise tp_size, pp_size or "
    "dp_size"
)


@dataclass(frozen=True)
class Finding:
    """A line about the run, with its remedy. Either it would stop the run, or it is a note."""

    text: str
    stops: bool = True


def refusals(checks: Iterable[Check]) -> list[Finding]:
    """A finding for each check that fails."""
    return [Finding(text) for text in failures(checks)]


def has_sizes(config: Config, model: PretrainedConfig) -> bool:
    """True if ranks, batches and bytes of the run can be worked out."""
    return not failures(size_checks(config, model))


def findings(config: Config, model: PretrainedConfig, folder: Path) -> list[Finding]:
    """Findings from the configuration and the model; `folder` holds the model's config.json."""
    problems = refusals([*config_checks(config), *model_checks(config, model), *length_checks(config, model)])
    problems += _of_dtypes(config, model)
    if (teacher := teacher_of(config) or served_teacher_of(config)) is not None:
        problems += refusals([partial(check_teacher_model, config, model, teacher)])
    if config.method == "rl" and importlib.util.find_spec("sglang") is None:
        problems.append(Finding("SGLang is not installed here, so server arguments were not checked", stops=False))
    else:
        problems += refusals(server_checks(config, folder))
    if has_sizes(config, model):
        problems += _of_cache(config, model) + _of_layout(config)
        unplanned = refusals([partial(planned_names, config)]) if config.method == "rl" else []
        problems += unplanned or _of_memory(config, model)  # a sync's buffers depend on the transport
        problems += _of_times(config, model)
    return list(dict.fromkeys(problems))


def _of_cache(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Sequences that no server's cache can hold."""
    if config.method != "rl":
        return []
    longest, cache, problems = longest_sequence(config) or 0, cache_of(config, model), []
    if (limit := config.sglang.get("context_length")) and int(limit) < longest:
        problems.append(
            Finding(f"sglang.context_length={limit} is below sequences of {longest} tokens; raise it to at least that")
        )
    if cache.tokens >= longest or not (cache.share or config.server.max_total_tokens):
        return problems
    if not cache.share:
        remedy = f"raise server.max_total_tokens={config.server.max_total_tokens} to at least that"
    else:
        remedy = "raise server.tp_size or sglang.mem_fraction_static, or shorten the sequences"
    return [
        *problems,
        Finding(f"the cache of a server holds {cache.tokens} tokens, a sequence has up to {longest}; {remedy}"),
    ]


def _of_dtypes(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Conversions that round weights between checkpoint, trainer and servers."""
    stored, problems = str(model.dtype).removeprefix("torch."), []
    if model.dtype is not None and stored != config.actor.dtype and config.actor.init == "checkpoint":
        problems.append(
            Finding(
                f"actor.path holds {stored} weights and actor.dtype={config.actor.dtype} trains others", stops=False
            )
        )
    if config.method == "rl" and (served := server_dtype(config, model)) != config.actor.dtype:
        text = f"server.dtype={config.server.dtype} serves {served} weights of actor.dtype={config.actor.dtype}: "
        remedy = "log-probs of servers and trainer differ by the rounding; make them equal"
        problems.append(Finding(text + remedy, stops=False))
    return problems


def _of_layout(config: Config) -> list[Finding]:
    """Layouts that would run, but slowly."""
    per_node, tp = config.cluster.gpus_per_node, config.parallel.tp_size
    if per_node and (tp > per_node or per_node % tp):
        text = f"parallel.tp_size={tp} over cluster.gpus_per_node={per_node}: tensor parallel groups span nodes, which "
        return [Finding(text + "is slow; choose a divisor of it", stops=False)]
    return []


def _of_memory(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Ranks and servers that do not fit into memory."""
    stages = memory_of(config, model)
    beside_of_stage = beside_actor(config, model, stages)
    peaks = totals(stages, beside_of_stage)
    servers = config.server.n_servers * config.server.tp_size if config.method == "rl" else 0
    synced = synced_server_of(config, model) if servers else ServerMemory(0, 0)
    server = synced.total
    if not config.cluster.gpus_per_node:
        per_stage = config.parallel.world_size() // config.parallel.pp_size
        needed = sum(peaks) * per_stage
        needed += servers * server + config.teacher.n_servers * config.teacher.tp_size * _served_teacher_bytes(config)
        available = psutil.virtual_memory().total
        if needed <= FULL * available:
            return []
        text = f"ranks and servers need {size(needed)} of this machine's {size(available)}; {REMEDY}"
        return [Finding(f"{text}, or plan for GPUs (cluster.gpus_per_node)")]
    if config.method == "rl" and config.server.colocate:
        return _of_phases(config, model)
    max_bytes = FULL * config.cluster.gpu_memory_gib * GIB
    limit = f"{FULL:.0%} of cluster.gpu_memory_gib={config.cluster.gpu_memory_gib:g}"
    problems = _of_unused_memory(config, model, peaks)
    for rank, (needed, beside) in enumerate(zip(peaks, beside_of_stage, strict=True)):
        if needed > max_bytes:
            others = f" with its {' and '.join(beside)}" if beside else ""
            problems.append(Finding(f"pipeline rank {rank}{others} needs {size(needed)} a GPU, over {limit}; {REMEDY}"))
    if servers:
        problems += _of_copies(config, model)
    if server > max_bytes:
        remedy = "raise server.tp_size, or lower server.max_total_tokens"
        others = f" with its {staging_name(config)}" if synced.staging else ""
        problems.append(Finding(f"a server rank{others} needs {size(server)}, over {limit}; {remedy}"))
    if (teacher := _served_teacher_bytes(config)) > max_bytes:
        remedy = "raise teacher.tp_size, or lower server.max_total_tokens"
        problems.append(Finding(f"a rank of a teacher server needs {size(teacher)}, over {limit}; {remedy}"))
    return problems


def _of_copies(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Plain copies of a server's rearranged layers, which a sync puts beside weights and cache."""
    server, share = synced_server_of(config, model), cache_of(config, model).share
    copies, others = server.copies, server.staging + GPU_RUNTIME
    free = (1 - share) * config.cluster.gpu_memory_gib * GIB - others
    if copies <= free or not share:
        return []
    lower = max(0.1, 1 - (copies + others) / (config.cluster.gpu_memory_gib * GIB))
    return [
        Finding(
            f"server.quantization={config.server.quantization} copies a server rank's layers during a sync, "
            f"{size(copies)}, and weights and cache leave {size(max(0, free))} of its GPU; set "
            f"+sglang.mem_fraction_static={lower:.2f} or lower, or raise server.tp_size"
        )
    ]


def _served_teacher_bytes(config: Config) -> int:
    """Bytes of a rank of a teacher server that the run starts; 0 if it starts none."""
    model, server = served_teacher_of(config), teacher_servers(config)
    if model is None or server is None:
        return 0
    return server_memory_of(replace(config, server=server), model).total


def _of_unused_memory(config: Config, model: PretrainedConfig, peaks: list[int]) -> list[Finding]:
    """Room for activations that a run computes again."""
    gib = config.cluster.gpu_memory_gib
    for recompute in RECOMPUTE[: RECOMPUTE.index(config.actor.recompute)]:  # the one with most memory first
        lighter = replace(config, actor=replace(config.actor, recompute=recompute))
        needed = max(peaks_of(lighter, model))
        if needed <= ROOMY * gib * GIB:
            free = size(gib * GIB - max(peaks))
            text = f"actor.recompute={config.actor.recompute} leaves {free} of a trainer GPU unused; "
            remedy = f"actor.recompute={recompute} needs {size(needed)} and computes less"
            return [Finding(text + remedy, stops=False)]
    return []


def _of_balance(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Servers and trainer of which one waits for most of a step."""
    step = estimate_step(config, model)
    sides = sorted((("the servers", step.rollout_s), ("the trainer", step.train_s)), key=lambda side: side[1])
    (fast, short), (slow, long) = sides
    if config.server.colocate or long < LOPSIDED * short:
        return []
    remedy = "server.n_servers up, parallel.dp_size down" if slow == "the servers" else "parallel.dp_size up"
    text = f"{slow} take {long:.0f} s of a step and {fast} {short:.0f} s, on GPUs of their own: "
    return [Finding(f"{text}move GPUs ({remedy}), or set server.colocate=true on one machine", stops=False)]


def _of_phases(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Phases of a co-located run in which trainer and servers together do not fit into a GPU."""
    gib, problems = config.cluster.gpu_memory_gib, []
    remedies = {
        "sampling": "lower sglang.mem_fraction_static or server.max_total_tokens, or set "
        "actor.offload_while_sampling=all",
        "training": REMEDY,
        "syncing": "raise parallel.tp_size and server.tp_size, or lower reshard.bucket_bytes",
    }
    for rank, phases in enumerate(phases_of(config, model)):
        for phase in phases:
            if phase.total > FULL * gib * GIB:
                text = f"{phase.name}: pipeline rank {rank} with {size(phase.trainer)} and a server rank with "
                limit = f"{size(phase.server)} share a GPU, over {FULL:.0%} of cluster.gpu_memory_gib={gib:g}; "
                problems.append(Finding(text + limit + remedies[phase.name]))
    return problems


def _of_times(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Deadlines and limits that the expected times exceed."""
    if not config.cluster.gpus_per_node or config.method != "rl" or not longest_sequence(config):
        return []
    problems = _of_balance(config, model)
    if limit := limits_rollout(config, model):
        problems.append(Finding(limit, stops=False))
    step, rollout = estimate_step(config, model), config.rollout
    for name, needs in (("request_timeout_s", step.longest_s), ("episode_timeout_s", step.longest_s)):
        if needs > getattr(rollout, name):
            text = f"rollout.{name}={getattr(rollout, name):g} cuts off completions of {config.gconfig.max_new_tokens} "
            remedy = f"tokens, which are expected to take {needs:.0f} s; raise it to {math.ceil(2 * needs)}"
            problems.append(Finding(text + remedy, stops=False))
    if step.rollout_s > rollout.batch_timeout_s:
        text = (
            f"rollout.batch_timeout_s={rollout.batch_timeout_s:g} is below the {step.rollout_s:.0f} s that a batch is "
        )
        problems.append(Finding(f"{text}expected to take; raise it to {math.ceil(2 * step.rollout_s)}", stops=False))
    return problems
