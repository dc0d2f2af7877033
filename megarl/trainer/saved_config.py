"""Makes or reopens a run's folder, with the whole configuration and the knobs that a resume changed."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from megarl.config import Config
from megarl.observe.progress import print_wrapped
from megarl.observe.run_folder import RunFolder, new_run, open_run
from megarl.trainer.run_owner import check_ended


def make_folder(config: Config, name: str = "") -> RunFolder:
    """Makes a new run folder with its config.yaml, called `name` or by the time; or reopens the one to resume.

    A resumed folder keeps its config.yaml; the configuration of the resume goes to config.resumed.yaml.
    """
    if not config.resume:
        folder = new_run(config.run_root, config.experiment_name, name)
        OmegaConf.save(OmegaConf.structured(config), folder.config)
        return folder
    folder = open_run(config.resume)
    check_ended(folder)
    for name, (was, now) in differences(OmegaConf.load(folder.config), OmegaConf.structured(config)).items():
        print_wrapped(f"resumed with {name}={now}, the run began with {was}")
    OmegaConf.save(OmegaConf.structured(config), folder.path / "config.resumed.yaml")
    return folder


def make_adapter_folder(job: RunFolder, name: str, config: Config) -> RunFolder:
    """Makes the folder of one adapter's run in that of its job, with its config.yaml; or reopens it."""
    folder = job.adapter(name)
    folder.make(again=True)
    OmegaConf.save(OmegaConf.structured(config), folder.path / f"config{'.resumed' if config.resume else ''}.yaml")
    return folder


def differences(before: Any, now: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Values before and now of the knobs that differ, by dotted path. Leaves out `resume` and `run_root`."""
    changed: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*before, *now]):
        a, b = before.get(key), now.get(key)
        if isinstance(a, DictConfig) and isinstance(b, DictConfig):
            changed.update(differences(a, b, f"{prefix}{key}."))
        elif a != b and prefix + key not in ("resume", "run_root"):
            changed[prefix + key] = (a, b)
    return changed
