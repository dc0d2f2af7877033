"""What can be told of a run from its configuration and its model's shape alone: sizes, machines, memory, problems.

Nothing here needs a GPU, a process group or the network; `megarl.preflight` prints it.
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
from megarl.actor.families import check_layout
from megarl.actor.memory import Load, ServerMemory, TrainerMemory, server_memory, trainer_memory
from megarl.algorithms import RLConfig
from megarl.config import Config, checks
from megarl.knobs import UserError
from megarl.rollout.sglang_server import check_config as check_server

GIB = 2**30
FULL = 0.95  # of a device's memory; allocators leave holes
REMEDY = (
    "lower actor.max_tokens_per_mb, set actor.recompute=full or actor.dtype=bfloat16, or raise tp_size, pp_size or "
    "dp_size"
)


def size(nbytes: float) -> str:
    """Bytes for people."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"


# -- what the run is --------------------------------------------------------------------------------------------------


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


def longest_sequence(config: Config) -> int | None:
    """Tokens of the longest sequence that the run can train on."""
    if config.train_dataset.max_length is None:
        return None
    return config.train_dataset.max_length + (config.gconfig.max_new_tokens if config.method == "rl" else 0)


def sequences_of_step(config: Config) -> tuple[int, int]:
    """Sequences of a step, and optimizer steps that they are divided into."""
    rows = config.train_dataset.batch_size
    if config.method == "preference":
        return 2 * rows, 1
    if config.method != "rl" or not isinstance(config.algorithm, RLConfig):
        return rows, 1
    return rows * config.gconfig.n_samples, config.algorithm.n_minibatches


def load_of(config: Config) -> Load:
    """The most that a data parallel rank works on in one optimizer step: every sequence as long as it may be."""
    sequences, parts = sequences_of_step(config)
    dp, most = config.parallel.sizes()["dp_size"], config.actor.max_tokens_per_mb
    share = math.ceil(sequences / parts / dp)
    longest = min(longest_sequence(config) or most, most)
    per_microbatch = max(1, most // longest)
    return Load(longest * min(share, per_microbatch), math.ceil(share / per_microbatch))


def memory_of(config: Config, model: PretrainedConfig) -> list[TrainerMemory]:
    """Of a trainer rank, by pipeline rank."""
    on_gpu, load = config.cluster.gpus_per_node > 0, load_of(config)
    return [
        trainer_memory(model, config.parallel, config.actor, load, rank, on_gpu)
        for rank in range(config.parallel.pp_size)
    ]


def server_dtype(config: Config) -> str:
    """The dtype of the served weights; auto is the checkpoint's, which is taken to be the actor's."""
    return config.actor.dtype if config.server.dtype == "auto" else config.server.dtype


def server_memory_of(config: Config, model: PretrainedConfig) -> ServerMemory:
    """Of a server rank; a cache that SGLang sizes itself (server.max_total_tokens=0) counts nothing."""
    return server_memory(model, config.server.tp_size, server_dtype(config), config.server.max_total_tokens)


# -- problems ---------------------------------------------------------------------------------------------------------


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
    if config.method == "rl":
        found += _of_servers(config, model, folder)
    if not refusals(of_sizes(config, model)):
        found += _of_layout(config) + _of_memory(config, model)
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
        needed = sum(stage.total for stage in stages) * per_stage + servers * server
        there = psutil.virtual_memory().total
        if needed <= FULL * there:
            return []
        text = f"ranks and servers need {size(needed)} of this machine's {size(there)}; {REMEDY}"
        return [Finding(f"{text}, or plan for GPUs (cluster.gpus_per_node)")]
    most = FULL * config.cluster.gpu_memory_gib * GIB
    limit = f"{FULL:.0%} of cluster.gpu_memory_gib={config.cluster.gpu_memory_gib:g}"
    found = [
        Finding(f"pipeline rank {rank} needs {size(stage.total)} a GPU, over {limit}; {REMEDY}")
        for rank, stage in enumerate(stages)
        if stage.total > most
    ]
    if server > most:
        remedy = "raise server.tp_size, or lower server.max_total_tokens"
        found.append(Finding(f"a server rank needs {size(server)}, over {limit}; {remedy}"))
    return found
