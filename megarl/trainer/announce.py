"""The opening lines of a run: model, data, layout, batch, folder, and the command for a real model."""

from __future__ import annotations

from megarl import __version__
from megarl.actor.memory import count_parameters
from megarl.config import Config
from megarl.data.config import BUNDLED, BUNDLED_JUDGED, BUNDLED_PAIRS
from megarl.observe.progress import print_wrapped
from megarl.observe.run_folder import RunFolder
from megarl.parallel import platform
from megarl.rollout.servers.server_config import uses_gpu
from megarl.trainer.batch_algebra import batch_of
from megarl.trainer.inputs import Inputs

REAL = {  # knobs that replace the bundled model and task, by method
    "rl": "data=gsm8k actor.path=Qwen/Qwen2.5-0.5B-Instruct actor.optimizer.lr=1e-6",
    "preference": "actor.path=Qwen/Qwen2.5-0.5B-Instruct actor.optimizer.lr=5e-7 train_dataset.path=FILE "
    "train_dataset.type=chat_template.default valid_dataset.path=FILE valid_dataset.type=chat_template.default",
    "sft": "data=gsm8k actor.path=Qwen/Qwen2.5-0.5B actor.init=checkpoint actor.optimizer.lr=1e-5",
}


def announce(config: Config, inputs: Inputs, folder: RunFolder) -> None:
    """Prints model, data, layout, devices, batch algebra and run folder. Called on rank 0."""
    tiny = config.actor.path.rstrip("/").endswith("assets/tiny")
    bundled = config.train_dataset.describe() in (BUNDLED, BUNDLED_PAIRS, BUNDLED_JUDGED)
    weights = "random weights" if config.actor.init == "random" else "its weights"
    lines = {
        "run": f"megarl {__version__}, {config.experiment_name}: {config.method}, {_length(config)}",
        "model": f"{config.actor.path}: {inputs.model.model_type}, {count_parameters(inputs.model) / 1e6:.3g}M "
        f"parameters, {config.actor.dtype}, from {weights}" + (" (the bundled tiny one)" if tiny else ""),
        "data": f"{_data(config, inputs)}" + (" (the bundled task)" if bundled else ""),
        "layout": _layout(config),
        "batch": _batch(config),
        "folder": str(folder.path),
    }
    if tiny or bundled:
        lines["for real"] = f"python -m megarl.train +experiment={config.experiment_name} {REAL[config.method]}"
    for name, text in lines.items():
        print_wrapped(f"{name:<9} {text}")


def _length(config: Config) -> str:
    return f"{config.total_train_steps} steps" + (f", resumed from {config.resume}" if config.resume else "")


def _data(config: Config, inputs: Inputs) -> str:
    size = inputs.train.rows if inputs.train else 0
    rows = "streamed" if size is None else f"{size} rows to train on"
    return f"{config.train_dataset.describe()}, {rows}, {len(inputs.valid)} held out"


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
