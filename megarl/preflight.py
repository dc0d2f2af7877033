"""Says what a run would be, and what would stop it, before anything is started.

python -m megarl.preflight +experiment=grpo_70b [group=name ...] [knob=value ...] [show=memory|layout|reshard]
python -m megarl.preflight check=invariance

Needs no GPU, no process group and no network, and takes seconds. Exit code 1 if something would stop the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from transformers import PretrainedConfig

from megarl import cli
from megarl.actor.families import read_config
from megarl.actor.memory import TrainerMemory, count_parameters, host_memory
from megarl.actor.shards import world_table
from megarl.config import Config
from megarl.knobs import UserError
from megarl.parallel.placement import places
from megarl.reshard import report
from megarl.reshard.geometry import server_holdings
from megarl.reshard.layout import Topology
from megarl.reshard.megatron import source_holdings
from megarl.reshard.planner import PlanError, plan
from megarl.trainer import findings as of_run
from megarl.trainer.findings import size

SHOW = ("memory", "layout", "reshard")
CHECK = ("invariance",)
DRAWN_NODES = 16
WIDTH = 130  # of what is not printed to a terminal
CHECKPOINT = 4 + 8  # bytes a parameter: main parameters and Adam's moments


def known_models() -> list[str]:
    """Hub names whose shapes are known without a download."""
    root = cli.ASSETS / "configs"
    return sorted(str(file.parent.relative_to(root)) for file in root.glob("*/*/config.json"))


def folder_of(path: str) -> Path:
    """The folder with the config.json of a local checkpoint or of a hub name in `known_models`.

    Raises:
        UserError: neither.
    """
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    if path not in known_models():
        raise UserError(
            f"actor.path={path} is no folder here, and its shape is not known without a download; give a local "
            f"checkpoint or one of {', '.join(known_models())}"
        )
    return cli.ASSETS / "configs" / path


def overview(config: Config, model: PretrainedConfig) -> Table:
    """Model and batch algebra, both sides of each equation."""
    table = _table("Run", "", "", show_header=False)
    sizes, load, (sequences, parts) = config.parallel.sizes(), of_run.load_of(config), of_run.sequences_of_step(config)
    count, data = count_parameters(model), config.train_dataset
    table.add_row("experiment", f"{config.experiment_name}: {config.method}, {config.total_train_steps} steps")
    shape = (
        f"{model.model_type}, {count / 1e9:.3g}B parameters"
        if count >= 1e9
        else f"{model.model_type}, {count / 1e6:.3g}M parameters"
    )
    table.add_row("model", f"{config.actor.path}: {shape}, {config.actor.dtype}")
    product = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in sizes.items())
    table.add_row("trainer", f"{product} = {config.parallel.world_size()} ranks")
    if config.method == "rl":
        table.add_row("servers", f"{config.server.n_servers} of tp {config.server.tp_size}")
        made = f"{data.batch_size} prompts x {config.gconfig.n_samples} completions = {sequences} sequences"
        longest = f"{data.max_length} + {config.gconfig.max_new_tokens}"
    else:
        made, longest = f"{sequences} sequences", f"{data.max_length}"
    table.add_row("step", f"{made} / {parts} = {sequences // parts} an optimizer step")
    table.add_row(
        "", f"{sequences // parts} / dp {sizes['dp_size']} = {sequences // parts / sizes['dp_size']:g} a replica"
    )
    table.add_row("sequence", f"{longest} = {of_run.longest_sequence(config)} tokens at most")
    table.add_row(
        "microbatch", f"at most {load.microbatches} of up to {load.tokens} tokens, of {config.actor.max_tokens_per_mb}"
    )
    disk = count * CHECKPOINT
    table.add_row("checkpoint", f"{size(disk)} x {config.saver.keep} kept = {size(disk * config.saver.keep)} of disk")
    return table


def layout_table(config: Config) -> Table:
    """Nodes by GPUs: which rank, and which part of the model, runs where."""
    machines = of_run.machines_of(config)
    shown = {"tp": config.parallel.tp_size, "cp": config.parallel.cp_size, "dp": config.parallel.sizes()["dp_size"]}
    shown |= {"pp": config.parallel.pp_size, "ep": config.parallel.ep_size}
    named = [name for name, size in shown.items() if size > 1]
    cells = {}
    for rank, place in enumerate(places(config.parallel)):
        cells[rank] = "\n".join([f"rank {rank}", " ".join(f"{name}{getattr(place, name)}" for name in named)])
    for number in range(machines.servers * machines.server_tp):
        server, tp = divmod(number, machines.server_tp)
        cells[machines.first_server_gpu + number] = f"server {server}\ntp{tp}"
    where = "GPU" if config.cluster.gpus_per_node else "process"
    count = f"{machines.nodes} node{'s' * (machines.nodes > 1)} of {machines.gpus_per_node}"
    table = _table(f"Layout: {count}", "node", *(f"{where} {i}" for i in range(machines.gpus_per_node)))
    table.show_lines = True
    for node in range(min(machines.nodes, DRAWN_NODES)):
        first = node * machines.gpus_per_node
        table.add_row(str(node), *(cells.get(first + i, "-") for i in range(machines.gpus_per_node)))
    if machines.nodes > DRAWN_NODES:
        table.caption = f"and {machines.nodes - DRAWN_NODES} more nodes"
    return table


def memory_tables(config: Config, model: PretrainedConfig) -> Iterator[Table]:
    """Bytes by part, of a trainer rank of each pipeline stage and of a server rank."""
    stages, load = of_run.memory_of(config, model), of_run.load_of(config)
    what = "GPU" if config.cluster.gpus_per_node else "rank"
    table = _table(f"Memory of a trainer {what}", "", *(f"pp {rank}" for rank in range(len(stages))))
    for field in fields(TrainerMemory):
        if any(getattr(stage, field.name) for stage in stages):
            table.add_row(field.name, *(size(getattr(stage, field.name)) for stage in stages))
    table.add_section()
    table.add_row("peak", *(size(stage.total) for stage in stages))
    if config.actor.offload_optimizer:
        host = [host_memory(model, config.parallel, config.actor, rank, load) for rank in range(len(stages))]
        table.add_row("on the host", *map(size, host))
    yield table
    if config.method == "rl":
        need, tokens = of_run.server_memory_of(config, model), config.server.max_total_tokens
        servers = _table(f"Memory of a server {what}", "", f"tp {config.server.tp_size}")
        servers.add_row("weights", size(need.weights))
        servers.add_row("KV cache", f"{size(need.kv_cache)} for {tokens} tokens" if tokens else "what is free")
        yield servers


def reshard_tables(config: Config, model: PretrainedConfig) -> RenderableType:
    """The plan of a weight sync in figures.

    Raises:
        UserError: there is nothing to sync, or the two sides do not fit together.
    """
    if config.method != "rl":
        raise UserError(f"show=reshard: method={config.method} has no servers that weights are sent to")
    machines, server = of_run.machines_of(config), config.server
    first, per_node = machines.first_server_gpu, machines.gpus_per_node
    topology = Topology(
        source_node=np.arange(machines.trainers) // per_node,
        node=np.arange(first, first + server.n_servers * server.tp_size) // per_node,
        server=np.arange(server.n_servers).repeat(server.tp_size),
    )
    dtype = of_run.server_dtype(config)
    try:
        made = plan(
            source_holdings(world_table(model, config.parallel), config.actor.dtype),
            server_holdings(
                model,
                tp_size=server.tp_size,
                ep_size=int(config.sglang.get("ep_size", 1)),
                n_servers=server.n_servers,
                dtype=dtype,
                cpu=not config.cluster.gpus_per_node,
            ),
            topology,
            config.reshard.bucket_bytes,
        )
    except PlanError as error:
        raise UserError(f"weights cannot be planned from trainer to servers: {error}") from error
    return report.render(made, config.cluster.network_gb_s * 1e9)


def _table(title: str, *columns: str, show_header: bool = True) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=show_header)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not show_header else "right", no_wrap=number == 0)
    return table


# -- the command ------------------------------------------------------------------------------------------------------


def main(config: Config, show: str | None) -> int:
    """Prints what was asked for, all of it by default, and what was found. Returns the exit code."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        folder = folder_of(config.actor.path)
        model = read_config(str(folder))
    except UserError as error:
        found = [of_run.Finding(str(error))]
    else:
        found = of_run.findings(config, model, folder)
        if not of_run.refusals(of_run.of_sizes(config, model)):
            for table in tables(config, model, show):
                console.print(table)
    for finding in found:
        print(f"{'STOPS' if finding.stops else 'note '}  {finding.text}")
    stops = sum(finding.stops for finding in found)
    print(f"{stops} problem{'s' * (stops != 1)} that would stop the run")
    return 1 if stops else 0


def tables(config: Config, model: PretrainedConfig, show: str | None) -> Iterator[RenderableType]:
    """What is printed, in order."""
    if show is None:
        yield overview(config, model)
    if show in (None, "layout"):
        yield layout_table(config)
    if show in (None, "memory"):
        yield from memory_tables(config, model)
    if show == "reshard" or (show is None and config.method == "rl"):
        yield reshard_tables(config, model)


def own_arguments(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The overrides, and this command's own `show=` and `check=`.

    Raises:
        UserError: a value that is not one of theirs.
    """
    own = {}
    for name, allowed in (("show", SHOW), ("check", CHECK)):
        for argument in [a for a in arguments if a.startswith(f"{name}=")]:
            arguments = [a for a in arguments if a != argument]
            own[name] = argument.partition("=")[2]
            if own[name] not in allowed:
                raise UserError(f"{argument} is not one of {', '.join(f'{name}={value}' for value in allowed)}")
    return arguments, own


def command(arguments: list[str]) -> int:
    """The command line. Returns the exit code."""
    overrides, own = own_arguments(arguments)
    if "check" in own:
        from megarl.trainer.invariance import run_invariance  # it loads Megatron

        return run_invariance()
    return main(cli.composed(overrides), own.get("show"))


if __name__ == "__main__":
    cli.exit_with(command)
