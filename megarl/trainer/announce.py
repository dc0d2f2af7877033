"""The opening lines of a run: model, data, layout, batch, folder, and the command for a real model."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from transformers import PretrainedConfig

from megarl import __version__
from megarl.actor.sizes.parameter_counts import count_parameters
from megarl.actor.weights.adapter_shards import shape_of
from megarl.config import Config
from megarl.data.config import BUNDLED, BUNDLED_JUDGED, BUNDLED_PAIRS, SourceConfig
from megarl.families import with_adapters
from megarl.observe.progress import print_wrapped
from megarl.observe.run_folder import RunFolder
from megarl.parallel import platform
from megarl.rollout.servers.server_config import uses_gpu
from megarl.trainer.batch_algebra import batch_of
from megarl.trainer.inputs import Inputs

# Knobs that replace the bundled model, by method, and the bundled task, by what its rows are.
REAL_MODEL = {
    "rl": "actor.path=Qwen/Qwen2.5-0.5B-Instruct actor.optimizer.lr=1e-6",
    "preference": "actor.path=Qwen/Qwen2.5-0.5B-Instruct actor.optimizer.lr=5e-7",
    "sft": "actor.path=Qwen/Qwen2.5-0.5B actor.init=checkpoint actor.optimizer.lr=1e-5",
}
REAL_TEACHER = "teacher.path=Qwen/Qwen2.5-1.5B-Instruct"
REAL_DATA = {
    BUNDLED: "data=gsm8k",
    BUNDLED_PAIRS: "data=ultrafeedback",
    BUNDLED_JUDGED: "data=ultrafeedback_judged",
}


def real_command(config: Config, arguments: Sequence[str]) -> str:
    """The command that runs the same with a real model and task; "" if this run has both, or is an environment's.

    It has the arguments of this run but those that it replaces. Knobs and groups that follow win.
    """
    if config.rollout.workflow == "environment":  # the task is the environment's
        return ""
    knobs: list[str] = []
    bundled = {part.path for part in config.train_dataset.parts()} & set(REAL_DATA)
    if bundled:
        knobs += REAL_DATA[min(bundled)].split()
        knobs += [f"{name}.sources=[]" for name in ("train_dataset", "valid_dataset") if getattr(config, name).sources]
    if _is_tiny(config.actor.path):
        knobs += REAL_MODEL[config.method].split()
        knobs += [REAL_TEACHER] if _is_tiny(config.teacher.path) else []
    if not knobs:
        return ""
    replaced = {knob.partition("=")[0] for knob in [*knobs, "resume="]}
    kept = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] not in replaced]
    kept += ["--"] if "--from-verl" in kept and "--" not in kept else []
    return shlex.join(["python", "-m", "megarl.train", *kept, *knobs])


def _is_tiny(path: str) -> bool:
    """True for the models in assets/."""
    return path.rstrip("/").endswith(("assets/tiny", "assets/tiny_teacher"))


def announce(config: Config, inputs: Inputs, folder: RunFolder) -> None:
    """Prints model, data, layout, devices, batch algebra and run folder. Called on rank 0."""
    tiny = _is_tiny(config.actor.path)
    bundled = config.train_dataset.describe() in (BUNDLED, BUNDLED_PAIRS, BUNDLED_JUDGED)
    weights = "random weights" if config.actor.init == "random" else "its weights"
    lines = {
        "run": f"megarl {__version__}, {config.experiment_name}: {config.method}, {_length(config)}",
        "model": f"{config.actor.path}: {inputs.model.model_type}, {count_parameters(inputs.model) / 1e6:.3g}M "
        f"parameters, {config.actor.dtype}, from {weights}"
        + (" (the bundled tiny one)" if tiny else "")
        + _adapters(config, inputs.model),
        "data": f"{_data(config, inputs)}" + (" (the bundled task)" if bundled else ""),
        "layout": _layout(config),
        "batch": _batch(config),
        "folder": str(folder.path),
    }
    for name, text in lines.items():
        print_wrapped(f"{name:<9} {text}")
    if command := real_command(config, sys.argv[1:]):
        print(f"{'for real':<9} {command}", flush=True)  # in one line, so that it can be copied


def _adapters(config: Config, model: PretrainedConfig) -> str:
    """Tells of adapters and their parameters, if they are trained."""
    if (adapters := shape_of(config.actor.lora)) is None:
        return ""
    count = count_parameters(with_adapters(model, adapters))
    base = "" if adapters.quantization == "none" else f", on a base in {adapters.quantization}"
    return f"; trained by adapters of rank {adapters.rank}, {count / 1e6:.3g}M parameters{base}"


def _length(config: Config) -> str:
    return f"{config.total_train_steps} steps" + (f", resumed from {config.resume}" if config.resume else "")


def _data(config: Config, inputs: Inputs) -> str:
    size = inputs.train.rows if inputs.train else 0
    rows = "streamed" if size is None else f"{size} rows to train on"
    return f"{config.train_dataset.describe()}, {rows}, {_evaluated(config, len(inputs.valid))}"


def _evaluated(config: Config, rows: int) -> str:
    """Number of rows that evaluations read, and whether a step may train on them too."""
    evaluator = config.evaluator
    if config.method != "sft" and not (evaluator.every_steps or evaluator.at_start or evaluator.at_end):
        return "no evaluation"
    train, valid = config.train_dataset.parts(), config.valid_dataset.parts()
    shared = any(_overlap(ours, theirs) for ours in train for theirs in valid)
    return f"{rows} to evaluate on, {'which may be trained on too' if shared else 'held out from training'}"


def _overlap(one: SourceConfig, other: SourceConfig) -> bool:
    """True unless two sources are different data, different splits, or slices of which one ends where one begins."""
    if (one.path, one.name) != (other.path, other.name):
        return False
    (base, low, high), (other_base, other_low, other_high) = _slice(one.split), _slice(other.split)
    touching = (high and high == other_low) or (other_high and other_high == low)
    return base == other_base and not touching


def _slice(split: str) -> tuple[str, str, str]:
    """Base, begin and end of a split such as `train[:75%]`, "" where it has none."""
    base, _, inner = split.partition("[")
    low, _, high = inner.removesuffix("]").partition(":")
    return base, low, high


def _layout(config: Config) -> str:
    parallel = config.parallel
    world = parallel.world_size()
    sizes = " x ".join(f"{name.removesuffix('_size')} {size}" for name, size in parallel.sizes().items())
    text = (
        f"{world} trainer rank{'s' * (world > 1)} = {sizes} "
        f"on {platform.device().type} ({platform.collective_backend()})"
    )
    if config.method == "rl":
        server = config.server
        where = "cuda" if uses_gpu(server) else "cpu"
        text += f"; {server.n_servers} SGLang server{'s' * (server.n_servers > 1)} of tp {server.tp_size} on {where}"
    return text


def _batch(config: Config) -> str:
    batch, prompts = batch_of(config), config.train_dataset.batch_size
    microbatches = f"microbatches of at most {config.actor.max_tokens_per_mb} tokens"
    if config.method == "preference":
        return f"{prompts} rows a step of two sequences each, {microbatches}"
    if config.method == "sft":
        return f"{prompts} sequences a step, {microbatches}"
    return (
        f"{prompts} prompts x {config.gconfig.n_samples} completions = {batch.sequences} sequences a step, "
        f"{batch.minibatches} optimizer step{'s' * (batch.minibatches > 1)} of {batch.per_update}, {microbatches}"
    )
