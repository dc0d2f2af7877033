"""Real SGLang servers and tiny checkpoints, started once and shared by the tests of this folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests import forked_servers
from tests.sglang.tiny_models import make_model, save_tokenizer


@pytest.fixture(scope="module", autouse=True)
def warm_servers() -> Iterator[None]:
    """Servers of a module's tests, and their restarts, begin in a moment."""
    with forked_servers.used():
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_checkpoint(family, tied=True, seed=0, kv_heads=2)`: the folder of a tiny random HF checkpoint."""

    @functools.cache
    def make(family: str = "qwen3", tied: bool = True, seed: int = 0, kv_heads: int = 2) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}-{seed}")
        make_model(family, tied, seed, kv_heads).save_pretrained(folder)
        save_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SGLangServers]]:
    """`serve(checkpoint, **knobs)`: ready servers on CPU, stopped with the session."""
    started: list[SGLangServers] = []

    def start(checkpoint: Path, **knobs: Any) -> SGLangServers:
        config = SGLangServerConfig(device="cpu", max_total_tokens=16384, **knobs)
        servers = SGLangServers(config, checkpoint, tmp_path_factory.mktemp("logs"), WEIGHT_LOADER)
        started.append(servers)
        with forked_servers.used():
            servers.start()
        servers.wait_ready()
        return servers

    yield start
    for servers in started:
        servers.stop()


@pytest.fixture(scope="session")
def fleet(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServers]:
    """Three servers of the tied tiny Qwen3 with one key, for pushes of weights: two of one rank, then one of two."""
    checkpoint = tiny_checkpoint("qwen3")
    groups = []
    for knobs in ({"n_servers": 2}, {"tp_size": 2}):
        config = SGLangServerConfig(device="cpu", max_total_tokens=16384, **knobs)
        groups.append(SGLangServers(config, checkpoint, tmp_path_factory.mktemp("logs"), WEIGHT_LOADER))
    all_of_them, wide = groups
    for server in wide.servers:
        server.args["api_key"] = all_of_them.api_key
    all_of_them.servers += wide.servers
    try:
        with forked_servers.used():
            all_of_them.start()
        all_of_them.wait_ready()
        yield all_of_them
    finally:
        all_of_them.stop()


@pytest.fixture(scope="session")
def server(serve: Callable[..., SGLangServers], tiny_checkpoint: Callable[..., Path]) -> SGLangServers:
    """One server of the tied tiny Qwen3. Its weights never change: tests that push weights start their own."""
    return serve(tiny_checkpoint("qwen3"))
