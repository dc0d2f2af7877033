"""Predicts a run, and the problems that would stop it, before anything is started.

python -m megarl.preflight +experiment=grpo_70b [group=name ...] [knob=value ...] [show=batch|layout|memory|...]
python -m megarl.preflight tune +experiment=grpo_70b [gpus=N] [group=name ...] [knob=value ...]
python -m megarl.preflight check=invariance [keep=FOLDER]

Needs no GPU, no process group and no network, and takes seconds. Exit code 1 if something would stop the run.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig

from megarl import cli
from megarl.actor.sizes.memory import TrainerMemory, host_memory
from megarl.actor.sizes.parameter_counts import count_parameters
from megarl.actor.trait_checks import trained_model
from megarl.config import Config, longest_sequence
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.launcher.slurm import plan_of, rendered
from megarl.parallel.config import MAX_RANKS
from megarl.parallel.placement import places
from megarl.preflight import sizing, sync_report
from megarl.preflight.communication import Communication
from megarl.preflight.environment import environment_findings
from megarl.preflight.findings import Finding, findings, has_sizes, refusals
from megarl.preflight.planned_places import planned_bucket_bytes, planned_transports
from megarl.preflight.planned_sync import planned_sync, sends_on, server_sync, staging_name, trainer_sync
from megarl.preflight.roofline import StepEstimate, estimate_step
from megarl.preflight.shapes import folder_of, teacher_of
from megarl.preflight.sizing import size
from megarl.preflight.tune import tune
from megarl.served_checks import adapter_names, adapters_on_servers
from megarl.teacher_checks import teacher_servers
from megarl.trainer.adapter_configs import load_adapters
from megarl.trainer.batch_algebra import batch_of
from megarl.versions import GPUs, gpus, versions

SHOW = ("batch", "layout", "memory", "reshard", "time", "script", "versions")
CHECK = ("invariance",)
DRAWN_NODES = 16
WIDTH = 130  # characters, where the output is no terminal and COLUMNS is not set

USAGE = f"""\
usage: python -m megarl.preflight +experiment=NAME [show=PART] [GROUP=NAME ...] [KNOB=VALUE ...], as for megarl.train
       python -m megarl.preflight tune +experiment=NAME [gpus=N] ...   the best layouts, by memory and time
       python -m megarl.preflight check=invariance [keep=DIR]          layouts against one process, on this machine
  show         {", ".join(SHOW)}: more of one part
  exit code    0: it can run; 1: something would stop it; 2: a mistake in the command"""


def overview(config: Config, model: PretrainedConfig) -> Table:
    """Model, layout, servers and disk space."""
    table = _table("Run", "", "", show_header=False)
    count, disk = count_parameters(model), sizing.disk_of(config, model)
    table.add_row("experiment", f"{config.experiment_name}: {config.method}, {config.total_train_steps} steps")
    number = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    table.add_row("model", f"{config.actor.path}: {model.model_type}, {number} parameters, {config.actor.dtype}")
    if (teacher := teacher_of(config)) is not None:
        table.add_row("teacher", f"{config.teacher.path}: {count_parameters(teacher) / 1e9:.3g}B parameters, frozen")
    product = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in config.parallel.sizes().items())
    table.add_row(
        "trainer", f"{product} = {config.parallel.world_size()} rank{'s' * (config.parallel.world_size() > 1)}"
    )
    if config.method == "rl":
        table.add_row("servers", f"{config.server.n_servers} of tp {config.server.tp_size}")
    if (servers := teacher_servers(config)) is not None:
        servers_text = f"{servers.n_servers} server{'s' * (servers.n_servers > 1)} of tp {servers.tp_size}"
        table.add_row("teacher", f"{config.teacher.path}: {servers_text}")
    kept = f"{size(disk.checkpoint)} x ({disk.keep} kept + 1 being written)"
    export = f" + {size(disk.export)} exported" if disk.export else ""
    table.add_row("disk", f"{kept}{export} = {size(disk.total)}, of {_free(config)} free at {config.run_root}")
    return table


def _free(config: Config) -> str:
    root = Path(config.run_root).expanduser().absolute()
    return size(shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free)


def batch_table(config: Config) -> Table:
    """The batch algebra, with both sides of each equation."""
    table, batch, data = _table("Batch", "", "", "", show_header=False), batch_of(config), config.train_dataset
    if config.method == "rl":
        longest = f"{data.max_length} prompt + {config.gconfig.max_new_tokens} completion"
        table.add_row("a sequence", f"{longest} = {longest_sequence(config)} tokens", "at most")
    else:
        table.add_row("a sequence", f"{data.max_length} tokens", "at most")
    names = {"rl": ("prompts", "completions"), "sft": ("examples", ""), "preference": ("rows", "completions")}
    for row in batch.equations(names[config.method]):
        table.add_row(*row)
    return table


def layout_table(config: Config) -> Table:
    """Nodes by GPUs, with the rank and its part of the model in each cell."""
    machines = machines_of(config)
    coordinates = {
        "tp": config.parallel.tp_size,
        "cp": config.parallel.cp_size,
        "dp": config.parallel.sizes()["dp_size"],
    }
    coordinates |= {"pp": config.parallel.pp_size, "ep": config.parallel.ep_size}
    named = [name for name, size in coordinates.items() if size > 1]
    cells = {}
    for rank, place in enumerate(places(config.parallel)):
        cells[rank] = "\n".join([f"rank {rank}", " ".join(f"{name}{getattr(place, name)}" for name in named)])
    for number in range(machines.servers * machines.server_tp):
        server, tp = divmod(number, machines.server_tp)
        gpu = machines.first_server_gpu + number
        cells[gpu] = "\n".join([*([cells[gpu]] if gpu in cells else []), f"server {server}", f"tp{tp}"])
    for number in range(machines.teachers * machines.teacher_tp):
        server, tp = divmod(number, machines.teacher_tp)
        cells[machines.first_teacher_gpu + number] = f"teacher {server}\ntp{tp}"
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
    """Bytes by part, for a trainer rank of each pipeline stage and for a server rank."""
    stages, load = sizing.memory_of(config, model), sizing.load_of(config)
    what = "GPU" if config.cluster.gpus_per_node else "rank"
    table = _table(f"Memory of a trainer {what}", "", *(f"pp {rank}" for rank in range(len(stages))))
    for field in fields(TrainerMemory):
        if any(getattr(stage, field.name) for stage in stages):
            table.add_row(field.name, *(size(getattr(stage, field.name)) for stage in stages))
    beside = sizing.beside_actor(config, model, stages)
    for name in beside[0]:
        table.add_row(name, *(size(others[name]) for others in beside))
    table.add_section()
    table.add_row("peak", *map(size, sizing.totals(stages, beside)))
    host = [host_memory(model, config.parallel, config.actor, rank, load) for rank in range(len(stages))]
    if config.method == "rl" and config.cluster.gpus_per_node:
        host = [nbytes + sync.host for nbytes, sync in zip(host, trainer_sync(config, model), strict=True)]
    if any(host):
        table.add_row("on the host", *map(size, host))
    yield table
    if config.method == "rl":
        need, cache = sizing.synced_server_of(config, model), sizing.cache_of(config, model)
        servers = _table(f"Memory of a server {what}", "", f"tp {config.server.tp_size}", show_header=False)
        servers.add_row("weights", size(need.weights))
        if need.adapters:
            servers.add_row("adapters", f"{size(need.adapters)}: {len(adapter_names(config)) + 1} slots")
        if cache.share:
            of = f"{cache.share:.2f} x {config.cluster.gpu_memory_gib:g} GiB - weights"
        else:
            of = f"server.max_total_tokens={config.server.max_total_tokens}" if cache.tokens else "what is free"
        servers.add_row("KV cache", f"{size(need.kv_cache)}: {of}" if cache.tokens else of)
        servers.add_row("a token of it", f"{cache.token_bytes / 1024:.4g} KiB")
        if cache.tokens:
            longest = batch_of(config).longest
            fits = f"{cache.tokens:,} tokens, {cache.tokens // longest:,} sequences of full length ({longest})"
            servers.add_row("holds", fits)
        servers.add_row(staging_name(config), _staging(config, model))
        servers.add_row("total", size(need.total))
        yield servers
    if (routes := sizing.routes_of(config, model)) is not None:
        yield routes_table(routes)
    if config.method == "rl" and config.server.colocate and config.cluster.gpus_per_node:
        yield phases_table(config, model, stages)


def _staging(config: Config, model: PretrainedConfig) -> str:
    """The buffers of a server rank for weight syncs, in words."""
    sync, nbytes = server_sync(config, model), planned_bucket_bytes(config)
    text = f"{size(sync.staging)}: {sync.staging // nbytes} x {size(nbytes)}"
    if sends_on(config):
        text += f", as servers send on (reshard.relay={config.reshard.relay})"
    return text + (" on the host" if config.cluster.gpus_per_node and not sync.on_gpu else "")


def routes_table(routes: sizing.RouteBytes) -> Table:
    """Bytes of replayed experts, for sequences of full length."""
    table = _table("Experts to replay", "", "", show_header=False)
    table.add_row("a token", f"{routes.token:,} bytes")
    table.add_row("a step's batch", f"{size(routes.batch)} on the host of every trainer rank")
    table.add_row("a microbatch", f"{size(routes.device)} on a device with all layers")
    if routes.answer:
        table.add_row("a sequence's answer", size(routes.answer))
        table.add_row("a server rank's record", f"{size(routes.server)} on its host")
    return table


def phases_table(config: Config, model: PretrainedConfig, stages: list[TrainerMemory]) -> Table:
    """Bytes on a GPU that trainer and servers share in turn, by phase and pipeline stage."""
    phases = sizing.phases_of(config, model)
    table = _table("Memory of a shared GPU", "phase", *(f"pp {rank}" for rank in range(len(stages))))
    for number, phase in enumerate(phases[0]):
        rows = [stage_phases[number] for stage_phases in phases]
        cells = (f"{size(row.trainer)} + {size(row.server)} = {size(row.total)}" for row in rows)
        table.add_row(phase.name, *cells)
    table.add_row("given up to the host", *(size(sizing.given_up_of(config, stage)) for stage in stages))
    table.caption = "trainer + server"
    return table


def time_table(config: Config, step: StepEstimate | None) -> Table:
    """A step's stages, with the derivation of each figure."""
    table = _table("Expected times", "", "", "", show_header=False)
    if step is None:
        table.add_row("a step", "not said for CPUs", "the run shows its seconds and tokens/s from the first step on")
        return table
    for stage in (*step.rollout, *step.train, *step.sync):
        table.add_row(stage.name, sync_report.duration(stage.seconds), stage.how)
    table.add_section()
    parts = "servers sample while the trainer trains: the longer of both, and the sync" if step.overlap else "the sum"
    if step.hidden_s:
        parts += f"; {step.hidden_s:.3g} s of it beside the next log-probs"
    table.add_row("a step", sync_report.duration(step.step_s), parts if config.method == "rl" else "")
    table.add_row(
        "the run", f"{step.step_s * config.total_train_steps / 3600:.1f} h", f"{config.total_train_steps} steps"
    )
    rate = f"{step.tokens_per_s:,.0f} tokens/s"
    table.add_row("trained", rate, f"{step.tokens_per_s / step.gpus:,.0f} a GPU of all {step.gpus}")
    if config.method == "rl":
        table.add_row("sampled", f"{step.sampled / step.rollout_s:,.0f} tokens/s", "while the servers work")
        waits = f"servers {step.rollout_s:.1f} s, trainer {step.train_s:.1f} s, weights {step.sync_s:.1f} s"
        table.add_row("bottleneck", step.bottleneck, waits)
    cluster = config.cluster
    table.caption = (
        f"a roofline, not measured: {cluster.gpu_tflops:g} TFLOP/s x {cluster.train_utilisation:g}, "
        f"{cluster.gpu_memory_gb_s:g} GB/s x {cluster.decode_utilisation:g} (decode), network "
        f"{cluster.network_gb_s:g} GB/s; sequences {cluster.mean_length:.0%} of the longest on average. All are knobs "
        "of cluster."
    )
    table.caption_justify = "left"
    return table


def traffic_table(traffic: Communication) -> Table:
    """Bytes and seconds of a trainer GPU's collectives in a step, by dimension of the layout."""
    table = _table("Communication of a step", "", "a GPU receives", "least", "of the least", "moved in", "exposed")
    for name, moved in traffic.parts().items():
        sizes = sync_report.size(int(moved.nbytes)), sync_report.size(int(moved.least))
        times = sync_report.duration(moved.seconds), sync_report.duration(moved.exposed)
        table.add_row(name, *sizes, f"{moved.nbytes / moved.least:.2f} x", *times)
    table.caption = (
        "exposed: not hidden by compute, pipeline bubble included; formulas in megarl/preflight/communication.py"
    )
    table.caption_justify = "left"
    return table


def versions_table(gpus: GPUs) -> Table:
    """Versions and GPUs of this machine."""
    table = _table("Found here", "", "", show_header=False)
    for name, version in versions().items():
        table.add_row(name, version or "not found")
    table.add_row("GPU driver", gpus.driver or "not found")
    if gpus.names:
        table.add_row("GPUs", f"{len(gpus.names)} x {gpus.names[0]}, {min(gpus.memory_mib) / 1024:.0f} GiB")
    else:
        table.add_row("GPUs", "not found")
    return table


def _table(title: str, *columns: str, show_header: bool = True) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=show_header)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not show_header else "right", no_wrap=number == 0)
    return table


# -- the command ------------------------------------------------------------------------------------------------------


def console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", WIDTH)))


def main(config: Config, arguments: list[str], show: str | None) -> int:
    """Prints one table or all of them, then the findings. Returns the exit code."""
    terminal, seen = console(), gpus()
    try:
        folder = folder_of(config.actor.path)
        model = trained_model(config.actor, read_config(str(folder)))
    except UserError as error:
        problems = [Finding(str(error))]
    else:
        problems = findings(config, model, folder)
        if has_sizes(config, model):
            problems += refusals([lambda: plan_of(config)] if config.cluster.gpus_per_node else [])
            try:
                for table in tables(config, model, arguments, show, seen):
                    terminal.print(table)
            except UserError as error:  # no plan of the weight sync
                if show is not None:
                    raise
                problems.append(Finding(str(error)))
            problems += environment_findings(config, model, folder, seen)
        if not any(problem.stops for problem in problems):
            problems += refusals([functools.partial(load_adapters, arguments, config)])
    problems = list(dict.fromkeys(problems))
    for finding in sorted(problems, key=lambda finding: finding.stops, reverse=True):
        print(f"{'STOPS' if finding.stops else 'note '}  {finding.text}")
    stops = sum(finding.stops for finding in problems)
    print(f"{stops} problem{'s' * (stops != 1)} that would stop the run")
    return 1 if stops else 0


def tables(
    config: Config, model: PretrainedConfig, arguments: list[str], show: str | None, seen: GPUs
) -> Iterator[RenderableType]:
    """Yields the tables in order; `arguments` is the run's command line."""
    if show is None:
        yield overview(config, model)
    if show in (None, "batch"):
        yield batch_table(config)
    if show in (None, "layout"):
        yield layout_table(config)
    if show in (None, "memory"):
        yield from memory_tables(config, model)
    bandwidth, sync, whole = config.cluster.network_gb_s * 1e9, None, None
    if show == "reshard" or (show in (None, "time") and config.method == "rl"):
        sync = planned_sync(config, model)
        if (adapters := adapters_on_servers(config)) is not None:
            whole, sync = sync, planned_sync(config, model, adapters)
    if show in (None, "reshard") and sync is not None:
        yield sync_report.render(sync, bandwidth, planned_transports(config), whole)
    if show in (None, "time"):
        sync_s = sync_report.summarise(sync).seconds(bandwidth) if sync is not None else 0.0
        step = estimate_step(config, model, sync_s) if config.cluster.gpus_per_node else None
        yield time_table(config, step)
        if step is not None and step.traffic.parts():
            yield traffic_table(step.traffic)
    if show == "script" or (show is None and config.cluster.gpus_per_node):
        yield Text("Slurm script", style="bold")
        yield Padding(Text(rendered(config, arguments)), (0, 0, 0, 2), expand=False)
    if show in (None, "versions"):
        yield versions_table(seen)


def split_options(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Splits the command line into overrides and this command's `tune`, `gpus=`, `show=`, `check=` and `keep=`.

    Raises:
        UserError: an unknown value, or an option without the one it belongs to.
    """
    options = {"tune": ""} if "tune" in arguments else {}
    arguments = [a for a in arguments if a != "tune"]
    for name, allowed in (("show", SHOW), ("check", CHECK), ("keep", None), ("gpus", None)):
        for argument in [a for a in arguments if a.startswith(f"{name}=")]:
            arguments = [a for a in arguments if a != argument]
            options[name] = argument.partition("=")[2]
            if allowed and options[name] not in allowed:
                raise UserError(f"{argument} is not one of {', '.join(f'{name}={value}' for value in allowed)}")
    if "keep" in options and "check" not in options:
        raise UserError(f"keep={options['keep']} keeps the figures of check=invariance; add it, or leave keep out")
    if "gpus" in options and "tune" not in options:
        raise UserError(f"gpus={options['gpus']} is the number of GPUs to tune for; add tune, or leave gpus out")
    if "gpus" in options and not (options["gpus"].isdecimal() and 0 < int(options["gpus"]) <= MAX_RANKS):
        raise UserError(f"gpus={options['gpus']} must be a whole number from 1 to {MAX_RANKS}")
    if "tune" in options and "show" in options:
        raise UserError(f"show={options['show']} is a part of the report; leave it out beside tune")
    return arguments, options


def command(arguments: list[str]) -> int:
    """Runs preflight on a command line. Returns the exit code."""
    overrides, options = split_options(arguments)
    if "check" in options:
        from megarl.preflight.invariance import run_invariance  # loads Megatron

        return run_invariance(Path(options["keep"]) if "keep" in options else None)
    config = cli.composed(overrides)
    if "tune" in options:
        folder = folder_of(config.actor.path)
        count = int(options["gpus"]) if "gpus" in options else None
        return tune(config, trained_model(config.actor, read_config(str(folder))), folder, count, console())
    return main(config, overrides, options.get("show"))
