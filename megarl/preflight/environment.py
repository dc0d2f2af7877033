"""Problems of a run that this machine shows: its files, disk, GPUs and Slurm allocation.

A run for GPUs is often planned on a machine without any, whose disk is not the cluster's. Problems that may not exist
on the cluster are notes, and the run itself looks again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from megarl.actor.gpu import fp8
from megarl.actor.weights.hf_files import Checkpoint
from megarl.algorithms import RewardModelConfig
from megarl.config import Config, longest_sequence
from megarl.data.config import BUNDLED, BUNDLED_JUDGED, BUNDLED_PAIRS, HUB_NAME
from megarl.families import as_scalar
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.launcher.slurm import GRACE_S
from megarl.observe.run_folder import open_run
from megarl.parallel import platform
from megarl.preflight.findings import Finding, refusals
from megarl.preflight.roofline import estimate_step
from megarl.preflight.sizing import disk_of, size
from megarl.rewards import reward_fn_of
from megarl.rollout.client.connections import addresses_in_environment
from megarl.rollout.workflows.choose import check_imports
from megarl.trainer.checkpoints.saver import check_resumable
from megarl.versions import GPUs


def environment_findings(config: Config, model: PretrainedConfig, folder: Path, gpus: GPUs) -> list[Finding]:
    """Findings about this machine; `folder` holds the model's config.json, `gpus` are this machine's."""
    here = not config.cluster.gpus_per_node or bool(gpus.names) or "SLURM_JOB_ID" in os.environ
    problems = [*_of_weights(config, model, folder), *_of_data(config), *_of_run_root(config, model, here)]
    if config.method == "rl":
        imports = [partial(reward_fn_of, name) for name in config.rewards.functions]
        problems += refusals([*imports, partial(check_imports, config.rollout)])
    if config.resume:
        scores = isinstance(config.algorithm, RewardModelConfig)
        trained = as_scalar(model) if scores else model
        problems += refusals([lambda: check_resumable(open_run(config.resume or "").path, trained, config.actor)])
    return [*problems, *_of_allocation(config, model), *_of_gpus(config, gpus), *_of_dispatcher(config, gpus)]


def _of_weights(config: Config, model: PretrainedConfig, folder: Path) -> list[Finding]:
    """Missing files of the model, files that are cut off, and weights in 8 bits without their scales."""
    path = config.actor.path
    if not Path(path).expanduser().is_dir():
        text = f"actor.path={path} is a hub name, looked at by its shape alone: its weights are fetched when the run "
        return [
            Finding(text + "starts; where nodes have no network, fetch them first and give the folder", stops=False)
        ]
    problems = []
    if not any(folder.glob("tokenizer*")):
        problems.append(
            Finding(f"actor.path={path} holds no tokenizer; save the model's own there with save_pretrained")
        )
    if config.actor.init == "random":
        return problems
    index, files = folder / "model.safetensors.index.json", []
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        text = f"actor.path={path} lacks {len(missing)} of its {len(files)} weight files, the first is {missing[0]}; "
        problems.append(Finding(text + "fetch them again"))
    elif not any(folder.glob("*.safetensors")):
        remedy = "fetch them, or set actor.init=random where it is trained from scratch (method=sft)"
        problems.append(Finding(f"actor.path={path} holds no weights (*.safetensors); {remedy}"))
    else:
        problems += refusals([partial(Checkpoint, path, model)])  # reads the files' headers alone
    return problems


def _of_data(config: Config) -> list[Finding]:
    """Data sets and row functions that cannot be found from here."""
    problems = []
    for name in ("train_dataset", "valid_dataset"):
        try:
            parts = getattr(config, name).parts()
        except UserError as error:
            problems.append(Finding(f"{name}: {error}"))
            continue
        for part in parts:
            bundled = part.path in (BUNDLED, BUNDLED_PAIRS, BUNDLED_JUDGED)
            if not bundled and not Path(part.path).expanduser().exists() and not HUB_NAME.fullmatch(part.path):
                text = f"{name}: {part.path!r} is no file or folder here and no hub name (owner/name); "
                problems.append(Finding(text + "give one that is, or the full path"))
            module, _, function = part.type.rpartition(".")
            if config.method == "rl" and module and not _importable(module):
                text = f"{name}: type={part.type} names {function} of {module}.py, which is not in {Path.cwd()}; "
                problems.append(Finding(text + "start the run where it is"))
    return list(dict.fromkeys(problems))


def _importable(module: str) -> bool:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _of_run_root(config: Config, model: PretrainedConfig, here: bool) -> list[Finding]:
    """A run folder that cannot be made, or a disk too small for its checkpoints."""
    root = Path(config.run_root).expanduser().absolute()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            Finding(f"run_root={config.run_root} cannot be written: {existing} is not a folder that you may write to")
        ]
    disk, free = disk_of(config, model), shutil.disk_usage(existing).free
    if disk.total <= free:
        return []
    text = f"checkpoints need {size(disk.total)} (saver.keep={disk.keep} and the one being written, "
    text += f"{size(disk.checkpoint)} each), and run_root={config.run_root} has {size(free)} free"
    remedy = "set run_root to a larger disk, or lower saver.keep"
    if not here:
        remedy += "; this is not a machine of the run, where it is looked at again"
    return [Finding(f"{text}; {remedy}", stops=here)]


def _of_allocation(config: Config, model: PretrainedConfig) -> list[Finding]:
    """Differences between the run and the Slurm allocation around this process."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES")
    per_node = config.cluster.gpus_per_node
    problems = _of_stop_signal()
    if nodes is None or not per_node:
        return problems
    machines = machines_of(config)
    if addresses_in_environment():  # external servers
        machines = replace(machines, servers=0)
    needed = machines.nodes
    if needed > int(nodes):
        text = f"the run needs {needed} nodes of cluster.gpus_per_node={per_node}, and this allocation has {nodes}; "
        problems.append(
            Finding(text + f"ask for more (sbatch --nodes={needed}), or lower server.n_servers or the layout")
        )
    elif needed < int(nodes):
        text = f"the run takes {needed} of this allocation's {nodes} nodes; ask for fewer, or raise server.n_servers"
        problems.append(Finding(text, stops=False))
    allocated = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if allocated.isdecimal() and int(allocated) < per_node:
        text = f"cluster.gpus_per_node={per_node}, and Slurm gives {allocated} GPUs of a node; "
        problems.append(Finding(text + "ask for all of them (--gpus-per-node), or set the knob"))
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdecimal() and longest_sequence(config):
        problems += _of_time_limit(config, model, int(end) - time.time())
    return problems


def _of_stop_signal() -> list[Finding]:
    """A time limit so short that Slurm asks the job to stop as soon as it has started."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal() or (left_s := int(end) - time.time()) > GRACE_S:
        return []
    text = f"the job's time ends in {max(left_s, 0):.0f} s, and its script is told to stop {GRACE_S} s before "
    return [
        Finding(
            text + "(--signal=B:USR1): it stops after its first step or before it; raise the time limit", stops=False
        )
    ]


def _of_time_limit(config: Config, model: PretrainedConfig, left_s: float) -> list[Finding]:
    """Checkpoints further apart than the time that is left."""
    every = config.saver.every_steps
    apart_s = every * estimate_step(config, model).step_s
    if every and apart_s <= left_s:
        return []
    when = f"saver.every_steps={every} steps, about {apart_s / 3600:.1f} h" if every else "saver.every_steps=0"
    text = f"the job's time ends in {left_s / 3600:.1f} h and checkpoints come every {when}: a node that fails before "
    return [Finding(text + "the first loses all; lower saver.every_steps or raise the time limit", stops=False)]


def _of_gpus(config: Config, gpus: GPUs) -> list[Finding]:
    """GPUs here with less memory than planned, or without the instructions of `actor.fp8`."""
    problems = []
    if gpus.names and config.actor.fp8 != "off":
        here = platform.compute_capability(), platform.cuda_version()
        problems += [replace(f, stops=False) for f in refusals([partial(fp8.check_gpu, config.actor, *here)])]
    per_node, least = config.cluster.gpus_per_node, min(gpus.memory_mib, default=0)
    if not per_node or not least or least >= 0.95 * config.cluster.gpu_memory_gib * 1024:
        return problems
    text = f"cluster.gpu_memory_gib={config.cluster.gpu_memory_gib:g}, and a GPU here ({gpus.names[0]}) has "
    return [*problems, Finding(f"{text}{least / 1024:.0f} GiB; set the knob to what there is", stops=False)]


def _of_dispatcher(config: Config, gpus: GPUs) -> list[Finding]:
    """A missing DeepEP; on a machine without GPUs, which may not be one of the run, it is a note."""
    if config.actor.moe_dispatcher != "flex" or importlib.util.find_spec("deep_ep") is not None:
        return []
    text = "actor.moe_dispatcher=flex needs the package deep_ep, which is not installed here; install it (pip install "
    return [Finding(text + "sgl-deep-ep), or set actor.moe_dispatcher=alltoall", stops=bool(gpus.names))]
