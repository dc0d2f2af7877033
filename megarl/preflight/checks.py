"""What would stop a run, and what its user should know, each in one line with the remedy.

Nothing here needs a GPU, a process group or the network; `megarl.preflight` prints it. What the run is stands in
`sizes.py`, what this machine shows of it in `surroundings.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
from transformers import PretrainedConfig

from megarl.actor import config as engine_config
from megarl.config import Config, checks
from megarl.families import check_layout
from megarl.knobs import UserError
from megarl.preflight.roofline import estimate_step, limits_rollout
from megarl.preflight.sizing import (
    GIB,
    beside_actor,
    cache_of,
    longest_sequence,
    memory_of,
    server_dtype,
    server_memory_of,
    size,
)
from megarl.rollout.servers.sglang_server import check_config as check_server

FULL = 0.95  # of a device's memory; allocators leave holes
REMEDY = (
    "lower actor.max_tokens_per_mb, set actor.recompute=full or actor.dtype=bfloat16, or raise tp_size, pp_size or "
    "dp_size"
)


@dataclass(frozen=True)
class Finding:
    """Something about the run that its user should know, with the remedy."""

    text: str
    stops: bool = True


def refusals(all_checks: Iterable[Callable[[], object]]) -> list[Finding]:
    """What each check that fails says."""
    found = []
    for check in all_checks:
        try:
            check()
        except UserError as error:
            found.append(Finding(str(error)))
    return list(dict.fromkeys(found))


def findings(config: Config, model: PretrainedConfig, folder: Path) -> list[Finding]:
    """Everything that can be found; `folder` holds the model's config.json."""
    found = refusals(
        [
            *(functools.partial(check, config) for check in checks(config)),
            *of_sizes(config, model),
            lambda: _check_length(config, model),
        ]
    )
    found += _of_dtypes(config, model)
    if config.method == "rl":
        found += _of_servers(config, model, folder)
    if not refusals(of_sizes(config, model)):
        found += _of_layout(config) + _of_memory(config, model) + _of_times(config, model)
    return list(dict.fromkeys(found))


def of_sizes(config: Config, model: PretrainedConfig) -> list[Callable[[], object]]:
    """The checks without which nothing can be laid out."""
    return [
        lambda: engine_config.check_config(config.actor),
        config.parallel.world_size,
        lambda: check_layout(model, config.parallel),
        lambda: _check_servers(config),
    ]


def _check_servers(config: Config) -> None:
    for name in ("n_servers", "tp_size"):
        if config.method == "rl" and getattr(config.server, name) < 1:
            raise UserError(f"server.{name}={getattr(config.server, name)} must be at least 1")
    if config.train_dataset.batch_size < 1:
        raise UserError(f"train_dataset.batch_size={config.train_dataset.batch_size} must be at least 1")


def _check_length(config: Config, model: PretrainedConfig) -> None:
    longest, most = longest_sequence(config), model.max_position_embeddings
    if longest is None:
        raise UserError("train_dataset.max_length is not set; give the longest row in tokens, longer ones are skipped")
    if longest > most:
        raise UserError(
            f"sequences of {longest} tokens exceed the model's max_position_embeddings={most}; shorten them"
        )
    if longest > config.actor.max_tokens_per_mb:
        raise UserError(
            f"sequences of {longest} tokens do not fit into actor.max_tokens_per_mb={config.actor.max_tokens_per_mb}; "
            f"raise it to at least {longest}"
        )


def _of_servers(config: Config, model: PretrainedConfig, folder: Path) -> list[Finding]:
    tp, per_node = config.server.tp_size, config.cluster.gpus_per_node
    found = []
    if importlib.util.find_spec("sglang") is None:
        found.append(Finding("SGLang is not installed here, so server arguments were not checked", stops=False))
    else:
        found += refusals([lambda: check_server(config.server, folder, config.sglang)])
    if tp >= 1 and model.num_attention_heads % tp:
        found.append(
            Finding(
                f"server.tp_size={tp} does not divide the model's num_attention_heads={model.num_attention_heads}; "
                "choose a divisor"
            )
        )
    if per_node and tp > per_node:
        found.append(Finding(f"server.tp_size={tp} exceeds cluster.gpus_per_node={per_node}: a server is on one node"))
    if not refusals(of_sizes(config, model)):
        found += _of_cache(config, model)
    return found


def _of_cache(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Sequences that no server could hold."""
    longest, cache, found = longest_sequence(config) or 0, cache_of(config, model), []
    if (limit := config.sglang.get("context_length")) and int(limit) < longest:
        found.append(
            Finding(f"sglang.context_length={limit} is below sequences of {longest} tokens; raise it to at least that")
        )
    if cache.tokens >= longest or not (cache.share or config.server.max_total_tokens):
        return found
    if not cache.share:
        remedy = f"raise server.max_total_tokens={config.server.max_total_tokens} to at least that"
    else:
        remedy = "raise server.tp_size or sglang.mem_fraction_static, or shorten the sequences"
    return [
        *found,
        Finding(f"the cache of a server holds {cache.tokens} tokens, a sequence has up to {longest}; {remedy}"),
    ]


def _of_dtypes(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Where numbers are rounded on their way."""
    kept, found = str(model.dtype).removeprefix("torch."), []
    if model.dtype is not None and kept != config.actor.dtype and config.actor.init == "checkpoint":
        found.append(
            Finding(f"actor.path holds {kept} weights and actor.dtype={config.actor.dtype} trains others", stops=False)
        )
    if config.method == "rl" and (served := server_dtype(config, model)) != config.actor.dtype:
        text = f"server.dtype={config.server.dtype} serves {served} weights of actor.dtype={config.actor.dtype}: "
        remedy = "log-probs of servers and trainer differ by the rounding; make them equal"
        found.append(Finding(text + remedy, stops=False))
    return found


def _of_layout(config: Config) -> list[Finding]:
    """What is slow about a layout that would run."""
    per_node, tp = config.cluster.gpus_per_node, config.parallel.tp_size
    if per_node and (tp > per_node or per_node % tp):
        text = f"parallel.tp_size={tp} over cluster.gpus_per_node={per_node}: tensor parallel groups span nodes, which "
        return [Finding(text + "is slow; choose a divisor of it", stops=False)]
    return []


def _of_memory(config: Config, model: PretrainedConfig) -> list[Finding]:
    """What does not fit."""
    stages = memory_of(config, model)
    servers = config.server.n_servers * config.server.tp_size if config.method == "rl" else 0
    server = server_memory_of(config, model).total if servers else 0
    if not config.cluster.gpus_per_node:
        per_stage = config.parallel.world_size() // config.parallel.pp_size
        needed = sum(stage.total + sum(beside_actor(config, stage).values()) for stage in stages) * per_stage
        needed += servers * server
        there = psutil.virtual_memory().total
        if needed <= FULL * there:
            return []
        text = f"ranks and servers need {size(needed)} of this machine's {size(there)}; {REMEDY}"
        return [Finding(f"{text}, or plan for GPUs (cluster.gpus_per_node)")]
    most = FULL * config.cluster.gpu_memory_gib * GIB
    limit = f"{FULL:.0%} of cluster.gpu_memory_gib={config.cluster.gpu_memory_gib:g}"
    found = []
    for rank, stage in enumerate(stages):
        beside = beside_actor(config, stage)
        needed = stage.total + sum(beside.values())
        if needed > most:
            others = f" with its {' and '.join(beside)}" if beside else ""
            found.append(Finding(f"pipeline rank {rank}{others} needs {size(needed)} a GPU, over {limit}; {REMEDY}"))
    if server > most:
        remedy = "raise server.tp_size, or lower server.max_total_tokens"
        found.append(Finding(f"a server rank needs {size(server)}, over {limit}; {remedy}"))
    return found


def _of_times(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Deadlines and limits that the expected times run against."""
    if not config.cluster.gpus_per_node or config.method != "rl" or not longest_sequence(config):
        return []
    found = []
    if limit := limits_rollout(config, model):
        found.append(Finding(limit, stops=False))
    step, waits = estimate_step(config, model), config.rollout
    for name, needs in (("request_timeout_s", step.longest_s), ("episode_timeout_s", step.longest_s)):
        if needs > getattr(waits, name):
            text = f"rollout.{name}={getattr(waits, name):g} cuts off completions of {config.gconfig.max_new_tokens} "
            remedy = f"tokens, which are expected to take {needs:.0f} s; raise it to {math.ceil(2 * needs)}"
            found.append(Finding(text + remedy, stops=False))
    if step.rollout_s > waits.batch_timeout_s:
        text = f"rollout.batch_timeout_s={waits.batch_timeout_s:g} is below the {step.rollout_s:.0f} s that a batch is "
        found.append(Finding(f"{text}expected to take; raise it to {math.ceil(2 * step.rollout_s)}", stops=False))
    return found
