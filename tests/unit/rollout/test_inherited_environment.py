"""A server takes the trainer's environment without its place among ranks, and without what SGLang's parts refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import cli
from megarl.parallel import nccl_memory
from megarl.parallel.determinism import OFF
from megarl.rollout.servers import server_config
from megarl.rollout.servers.inherited_environment import ALLOCATOR
from megarl.rollout.servers.server_config import SGLangServerConfig, choose_platform
from megarl.rollout.servers.sglang_server import SGLangServer
from tests.held_ports import held_port

# What torchrun gives a rank (torch/distributed/elastic/agent/server/local_elastic_agent.py).
TORCHRUN = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/none",
}  # fmt: skip
# As SGLang's ranks begin on CUDA (srt/distributed/bootstrap.py).
BEGINS = """
import datetime, sys, torch.distributed as dist
dist.init_process_group("gloo", sys.argv[1], rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
print("began")
"""


def environment_of(tmp_path: Path, **knobs: Any) -> dict[str, str]:
    platform: Any = SimpleNamespace(environment=lambda scratch: {})
    return SGLangServer(0, SGLangServerConfig(**knobs), platform, 1, {}, tmp_path)._environment("scratch")


def test_a_server_of_a_torchrun_rank_begins_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    environment = environment_of(tmp_path)
    assert not TORCHRUN.keys() & environment.keys()
    assert environment["NCCL_DEBUG"] == "WARN"
    address = f"tcp://127.0.0.1:{held_port()}"
    command = [sys.executable, "-c", BEGINS, address]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "began\n", done.stderr[-2000:]


@pytest.mark.parametrize("path", ["/usr/bin:/bin", None])
def test_programs_of_the_environment_are_found_though_nobody_activated_it(
    path: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang compiles its kernels with `ninja`, by this name."""
    if path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", path)
    first, *others = environment_of(tmp_path)["PATH"].split(":")
    assert first == str(Path(sys.executable).parent)
    assert shutil.which("ninja", path=first)
    assert others == (path or os.defpath).split(":")


@pytest.mark.parametrize("name", ALLOCATOR)
def test_a_server_that_gives_up_memory_has_no_expandable_segments(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for given, left in (
        ("expandable_segments:True", ""),
        ("max_split_size_mb:64, expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments:True,roundup_power2_divisions:[256:1,512:2]", "roundup_power2_divisions:[256:1,512:2]"),
    ):
        monkeypatch.setenv(name, given)
        assert environment_of(tmp_path, colocate=True)[name] == left
        assert environment_of(tmp_path)[name] == given


@pytest.mark.parametrize(
    ("own", "sglang", "both"),
    [
        (None, {}, "0"),
        ("1", {}, "1"),
        (None, {"enable_symm_mem": True}, "1"),
        ("0", {"enable_symm_mem": True}, "1"),
        (None, {"moe_a2a_backend": "deepep_v2"}, "1"),
        ("0", {"moe_a2a_backend": "deepep_v2"}, "0"),
    ],
)
def test_trainer_and_server_have_one_kind_of_nccl_memory(
    own: str | None, sglang: dict[str, Any], both: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server's value is set, so SGLang, which has rules of its own where it is absent, keeps it."""
    monkeypatch.setenv(nccl_memory.VARIABLE, own or "")
    if own is None:
        monkeypatch.delenv(nccl_memory.VARIABLE)
    monkeypatch.setattr(server_config, "gpu_count", lambda: 1)
    server = SGLangServerConfig(device="cuda")
    assert choose_platform(server, sglang, OFF).environment("")[nccl_memory.VARIABLE] == both
    nccl_memory.enter(sglang)
    assert os.environ[nccl_memory.VARIABLE] == both


@pytest.mark.parametrize(("method", "value"), [("rl", "0"), ("sft", None)])
def test_a_trainer_of_one_rank_has_it_without_a_launcher(
    method: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (nccl_memory.VARIABLE, "RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    cli.load([f"+experiment={'gsm8k_grpo' if method == 'rl' else 'gsm8k_sft'}"])
    assert os.environ.get(nccl_memory.VARIABLE) == value
