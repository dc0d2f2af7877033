"""Writes the table of SGLang's backends into docs/install_gpu.md: `python docs/make_gpu_backends.py`, on any machine.

SGLang resolves the arguments that megarl passes, with a mocked GPU. The mock covers what resolution asks the machine:
torch.cuda's device count, capability, properties and memory, the version of CUDA, and that flashinfer and the memory
saver are installed.
It launches no kernel, so the table says what SGLang chooses, and not that it runs.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megarl import cli
from megarl.config import Config
from megarl.cpu import sglang_launch
from megarl.families import CONTAINERS, FAMILIES
from megarl.preflight.report import folder_of
from megarl.rollout.servers import server_config
from megarl.rollout.servers.server_config import server_arg_options
from megarl.rollout.servers.sglang_server import SGLangServers

PAGE = Path(__file__).with_name("install_gpu.md")
BEGIN, END = "<!-- backends: begin -->", "<!-- backends: end -->"
ARCHITECTURES = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
GPUS = {"sm80": "A100", "sm90": "H100, H200", "sm100": "B200", "sm120": "RTX 50, RTX PRO 6000"}
MEMORY = 80 * 2**30
SHOWN = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "moe_runner_backend", "dtype")


@contextmanager
def mocked_gpu(architecture: str) -> Iterator[None]:
    """A machine with eight GPUs of an architecture, as torch and SGLang ask about it."""
    capability = ARCHITECTURES[architecture]
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], total_memory=MEMORY, multi_processor_count=132, name="mock"
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": "mock",
        "mem_get_info": (MEMORY, MEMORY),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(server_config, "has_memory_saver", return_value=True))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        common = importlib.import_module("sglang.srt.utils.common")
        for function in vars(common).values():  # its answers about the last machine
            if isinstance(function, functools._lru_cache_wrapper):
                function.cache_clear()
        override = importlib.import_module("sglang.srt.runtime_context").override_platform
        stack.enter_context(override(has_flashinfer=True))
        yield


def prepare() -> None:
    """Imports SGLang as on a machine with GPUs. Packages that are not installed here are stood in for."""
    sglang_launch.install()
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    with mocked_gpu("sm90"):
        importlib.import_module("sglang.srt.server_args")


def resolved(config: Config, model: Path) -> Any:
    """The arguments of a run's first server, as SGLang reads megarl's file and resolves it."""
    server_args = importlib.import_module("sglang.srt.server_args")
    with tempfile.TemporaryDirectory() as folder:
        server = SGLangServers(
            config.server, model, folder, sglang=config.sglang, deterministic=config.determinism
        ).servers[0]
        options, file = server_arg_options(), Path(folder) / "arguments.yaml"
        file.write_text(json.dumps({options[name]: value for name, value in server.args.items()}))
        arguments = server_args.prepare_server_args(["--config", str(file), "--log-level", "error"])
    arguments.resolve_once()
    return arguments


def shown(arguments: Any) -> dict[str, Any]:
    values = arguments.resolved_dict()
    return {name: values[name] for name in SHOWN}


def configs() -> dict[str, Config]:
    """Every recipe with servers, then every model that no recipe uses."""
    recipes = {path.stem: cli.load([f"+experiment={path.stem}"]) for path in _yaml("experiment")}
    chosen = {name: config for name, config in recipes.items() if config.method == "rl"}
    used = {config.actor.path for config in chosen.values()}
    for path in _yaml("model"):
        config = cli.composed([f"model={path.stem}"])
        if config.actor.path not in used:
            chosen[f"model={path.stem}"] = config
    return chosen


def _yaml(group: str) -> list[Path]:
    return sorted((cli.CONFIGS / group).glob("*.yaml"))


def resolutions() -> dict[str, dict[str, Any]]:
    """Model type, and resolved arguments on each architecture, of every entry of `configs`."""
    entries: dict[str, dict[str, Any]] = {}
    for name, config in configs().items():
        folder = folder_of(config.actor.path)
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        entries[name] = {"family": CONTAINERS.get(kind, kind), "on": {}}
        for architecture in ARCHITECTURES:
            with mocked_gpu(architecture):
                entries[name]["on"][architecture] = shown(resolved(config, folder))
    return entries


def render(entries: dict[str, dict[str, Any]]) -> str:
    """The table; entries of one family with equal backends share a line."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, entry in entries.items():
        values = list(entry["on"].values())
        experts = values[0]["moe_runner_backend"] if FAMILIES[entry["family"]].experts else "-"
        cells = [entry["family"], values[0]["dtype"], *(value["attention_backend"] for value in values), experts]
        lines.setdefault(tuple(cells), []).append(f"`{name}`")
    heads = [f"{GPUS[name]} ({name})" for name in ARCHITECTURES]
    table = [
        f"| recipe or model | family | dtype | {' | '.join(heads)} | experts |",
        "|---" * (len(heads) + 4) + "|",
        *(f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in lines.items()),
    ]
    return "\n".join([BEGIN, *table, END])


def main() -> None:
    logging.disable(logging.WARNING)
    prepare()
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + render(resolutions()) + rest.split(END)[1])


if __name__ == "__main__":
    main()
