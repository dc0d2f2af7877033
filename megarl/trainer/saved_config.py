"""The folder of a run as the trainer makes it: with the whole configuration, and what a resume changed of it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from megarl.config import Config
from megarl.observe.run_folder import RunFolder, new_run, open_run


def make_folder(config: Config, name: str = "") -> RunFolder:
    """The run's folder, new (`name`, else named by the time) with its config.yaml, or the one to resume, which keeps
    its own."""
    if not config.resume:
        folder = new_run(config.run_root, config.experiment_name, name)
        OmegaConf.save(OmegaConf.structured(config), folder.config)
        return folder
    folder = open_run(config.resume)
    for name, (was, now) in differences(OmegaConf.load(folder.config), OmegaConf.structured(config)).items():
        print(f"resumed with {name}={now}, the run began with {was}", flush=True)
    OmegaConf.save(OmegaConf.structured(config), folder.path / "config.resumed.yaml")
    return folder


def differences(before: Any, now: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The knobs, by dotted path, that differ between two configurations; where they lie is none of it."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*before, *now]):
        a, b = before.get(key), now.get(key)
        if isinstance(a, DictConfig) and isinstance(b, DictConfig):
            found.update(differences(a, b, f"{prefix}{key}."))
        elif a != b and prefix + key not in ("resume", "run_root"):
            found[prefix + key] = (a, b)
    return found
