"""CUDA_DEVICE_MAX_CONNECTIONS: set in trainer ranks of every launcher before a GPU is asked for, never in servers."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.actor import engine
from megarl.actor.config import EngineConfig
from megarl.launcher import local, ray, slurm
from megarl.launcher.job import Job
from megarl.parallel import hardware_queues
from megarl.parallel.config import ParallelConfig
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServer

pytestmark = pytest.mark.cpu_options("reads the environment alone")

NAME = hardware_queues.VARIABLE
HOPPER, BLACKWELL = (9, 9), (10, 12)
# NVML of a machine whose GPUs have these major compute capabilities, of which one of 0 cannot be opened.
LIBRARY = """
static const int majors[] = {%s};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = sizeof majors / sizeof *majors; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, const void **device) { *device = majors + i; return majors[i] ? 0 : 4; }
int nvmlDeviceGetCudaComputeCapability(const int *device, int *major, int *minor) {
  *major = *device; *minor = 0; return 0;
}
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[tuple[int, ...]], None]:
    """Gives this machine a driver with GPUs, and a rank without a value of the user's."""
    monkeypatch.setenv(NAME, "")  # undone after the test
    monkeypatch.delenv(NAME)

    def has(majors: tuple[int, ...]) -> None:
        source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(LIBRARY % ", ".join(map(str, majors)))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        monkeypatch.setattr(hardware_queues, "NVML", str(library))

    monkeypatch.setattr(hardware_queues, "_entered", False)
    return has


@pytest.mark.parametrize(
    ("majors", "sizes", "value"),
    [
        (HOPPER, {"tp_size": 2}, "1"),
        ((8,), {"cp_size": 2}, "1"),
        ((0, 10, 9), {"tp_size": 4}, "1"),  # the lowest of those that open
        (BLACKWELL, {"tp_size": 2, "cp_size": 2}, None),
        (HOPPER, {"dp_size": 8, "ep_size": 8, "pp_size": 2}, None),
    ],
)
def test_one_queue_where_megatron_relies_on_the_order_of_calls(
    majors: tuple[int, ...], sizes: dict[str, int], value: str | None, machine: Callable[[tuple[int, ...]], None]
) -> None:
    machine(majors)
    hardware_queues.enter(ParallelConfig(**sizes))
    assert os.environ.get(NAME) == value


def test_a_push_beside_scoring_has_queues_of_its_own_in_the_engine_too(machine: Any) -> None:
    """Its messages would hold up the collectives of scoring. The engine asks again, without this fact."""
    machine(HOPPER)
    hardware_queues.enter(ParallelConfig(tp_size=2), pushes_beside_scoring=True)
    hardware_queues.enter(ParallelConfig(tp_size=2))
    assert NAME not in os.environ


def test_a_machine_without_a_driver_sets_nothing(monkeypatch: pytest.MonkeyPatch, machine: Any) -> None:
    monkeypatch.setattr(hardware_queues, "NVML", "libno-such-driver.so.1")
    hardware_queues.enter(ParallelConfig(tp_size=2))
    assert NAME not in os.environ


@pytest.mark.parametrize(
    ("given", "majors", "would"),
    [("8", HOPPER, "would set 1"), ("1", BLACKWELL, "would leave it unset"), ("1", HOPPER, None)],
)
def test_a_value_of_the_user_is_kept_and_said_once_where_it_is_another(
    given: str, majors: tuple[int, ...], would: str | None, machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    machine(majors)
    monkeypatch.setenv(NAME, given)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            hardware_queues.enter(ParallelConfig(tp_size=2))
    assert os.environ[NAME] == given
    said = [record.getMessage() for record in caplog.records if record.name == hardware_queues.__name__]
    assert len(said) == (would is not None)
    assert would is None or (f"{NAME}={given} of the environment is kept" in said[0] and would in said[0])


def _of_local(_: Path, folder: Path) -> dict[str, str]:
    return local.rank_environment(0, 2, folder)


def _of_ray(_: Path, folder: Path) -> dict[str, str]:
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(ray.PASSED_ON)}
    return passed_on | Job(folder, folder, (), (), {}, 2, 1, 1, 8, 60.0).rank(0, 0)[1]


def _of_slurm(home: Path, folder: Path) -> dict[str, str]:
    """What a task sees after the site's settings and the script of a rank."""
    task = {**os.environ, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "MEGARL_HOME": str(folder)}
    command = f"source {home / 'env.sh'} && exec bash {home / 'rank.sh'} env -0"
    seen = subprocess.run(["bash", "-c", command], env=task, capture_output=True, check=True, text=True).stdout
    return dict(line.split("=", 1) for line in seen.split("\0") if line)


def _of_torchrun(_: Path, folder: Path) -> dict[str, str]:
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("own", [None, "8"])
@pytest.mark.parametrize("launcher", [_of_local, _of_ray, _of_slurm, _of_torchrun])
def test_ranks_of_every_launcher_have_it_before_they_ask_for_a_gpu(
    launcher: Callable[[Path, Path], dict[str, str]],
    own: str | None,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    machine(HOPPER)
    if own:
        monkeypatch.setenv(NAME, own)
    environment = launcher(Path(slurm.SCRIPTS), tmp_path)
    assert environment.get(NAME, own) == own, "a launcher's own processes and servers have what the user gave"
    if launcher is _of_ray:  # on another node
        monkeypatch.delenv(NAME, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    seen: list[str | None] = []

    def asked(*_: Any, **__: Any) -> Any:
        seen.append(os.environ.get(NAME))
        return 0

    monkeypatch.setattr(torch.cuda, "device_count", asked)
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    cli.load(["+experiment=gsm8k_grpo", "parallel.tp_size=2", "parallel.sequence_parallel=true"])
    asked()
    assert set(seen) == {own or "1"}


def test_an_engine_of_a_script_has_it_before_the_checks_ask_for_a_gpu(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AskedError(Exception):
        pass

    def checks(*_: Any) -> None:
        raise AskedError(os.environ.get(NAME))

    machine(HOPPER)
    monkeypatch.setattr(engine, "device_checks", checks)
    with pytest.raises(AskedError, match=r"^1$"):
        engine.MegatronEngine(EngineConfig(path="none"), ParallelConfig(tp_size=2))


@pytest.mark.parametrize("value", ["1", "8"])  # a rank's, or the user's
def test_servers_never_inherit_it(value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(NAME, value)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    platform: Any = SimpleNamespace(environment=lambda scratch: {"OWN": scratch})
    environment = SGLangServer(0, SGLangServerConfig(), platform, 1, {}, tmp_path)._environment("scratch")
    assert NAME not in environment
    assert (environment["NCCL_DEBUG"], environment["OWN"]) == ("WARN", "scratch")
