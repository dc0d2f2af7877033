"""Shapes of models that a plan reads, from local checkpoints or from the bundled config files."""

from __future__ import annotations

import functools
from pathlib import Path

from transformers import PretrainedConfig

from megarl import cli
from megarl.algorithms import OPDConfig
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.teacher_checks import teacher_servers


def known_models() -> list[str]:
    """Hub names of models with a config.json in the assets."""
    root = cli.ASSETS / "configs"
    return sorted(str(file.parent.relative_to(root)) for file in root.glob("*/*/config.json"))


def folder_of(path: str, knob: str = "actor.path") -> Path:
    """Folder with the config.json of a local checkpoint, or of a hub name in `known_models`, which `knob` gives.

    Raises:
        UserError: the path is neither.
    """
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    if path not in known_models():
        raise UserError(
            f"{knob}={path} is no folder here, and its shape is not known without a download; give a local "
            f"checkpoint or one of {', '.join(known_models())}"
        )
    return cli.ASSETS / "configs" / path


def server_dtype(config: Config, model: PretrainedConfig) -> str:
    """Dtype of the served weights; `auto` is the checkpoint's."""
    if config.server.dtype != "auto":
        return config.server.dtype
    return str(model.dtype).removeprefix("torch.") if model.dtype is not None else config.actor.dtype


def teacher_of(config: Config) -> PretrainedConfig | None:
    """Shape of the frozen teacher in the trainer's ranks; None if there is none."""
    if not isinstance(config.algorithm, OPDConfig) or config.teacher.source != "trainer" or not config.teacher.path:
        return None
    return _shape(config.teacher.path)


def served_teacher_of(config: Config) -> PretrainedConfig | None:
    """Shape of the teacher in servers that the run starts; None if it starts none."""
    return _shape(config.teacher.path) if teacher_servers(config) is not None and config.teacher.path else None


@functools.lru_cache(8)
def _shape(path: str) -> PretrainedConfig:
    return read_config(str(folder_of(path, "teacher.path")))
