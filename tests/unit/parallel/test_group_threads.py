"""Process groups end with what made them: no thread of gloo outlives an engine or a transport."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.supervised import MegatronLMEngine
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.reshard.transfer.transports.gloo import GlooTransport
from megarl.types import PackedBatch, cu_seqlens_of


def gloo_threads() -> set[str]:
    """Numbers of gloo's threads in this process, without groups that are garbage."""
    gc.collect()
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ends meanwhile
            if "gloo" in (task / "comm").read_text():
                found.add(task.name)
    return found


def all_end(before: set[str]) -> bool:
    """Waits until no thread of gloo is left but earlier ones: one of a closed group takes a moment to end."""
    deadline = time.monotonic() + 300
    while gloo_threads() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    return not gloo_threads() - before


@pytest.fixture
def before() -> set[str]:
    """Gloo's threads of earlier tests, which may end during this one."""
    groups.destroy()
    return gloo_threads()


@pytest.mark.cpu_options("the world's backend is gloo")
def test_a_lone_engine_has_one_group_and_leaves_no_thread(before: set[str], checkpoints: Callable[..., Path]) -> None:
    engine = MegatronEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True))))
    for _ in range(3):
        engine.initialize()
        assert 0 < len(gloo_threads() - before) <= 3  # one group: a loop, and two workers
        engine.destroy()
        assert all_end(before)


def test_a_group_in_a_cycle_ends_with_its_world_and_not_later(before: set[str]) -> None:
    class Holder:
        def __init__(self) -> None:
            self.group, self.itself = torch.distributed.group.WORLD, self

    groups.initialize(ParallelConfig())
    gc.disable()
    try:
        held = weakref.ref(Holder())
        assert held() is not None
        groups.destroy()
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_nothing_is_left_of_an_engine_that_was_trained(
    family: str, before: set[str], checkpoints: Callable[..., Path]
) -> None:
    engine = MegatronLMEngine(
        EngineConfig(path=str(checkpoints(family, tied=False)), optimizer=OptimizerConfig(lr=0.1))
    )
    engine.initialize()
    tokens = {"input_ids": torch.arange(40), "loss_mask": torch.ones(40, dtype=torch.bool)}
    engine.train_lm(PackedBatch(cu_seqlens_of(torch.tensor([25, 15])), tokens))
    parts = [weakref.ref(part) for part in (engine.ddps[0], engine.modules[0], next(engine.modules[0].parameters()))]
    engine.destroy()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)
    assert all_end(before)


def test_two_engines_of_a_process_share_the_group(before: set[str], checkpoints: Callable[..., Path]) -> None:
    path = str(checkpoints("qwen3", tied=True))
    engines = [MegatronEngine(EngineConfig(path=path)), MegatronEngine(EngineConfig(path=path), trainable=False)]
    for engine in engines:
        engine.initialize()
    assert 0 < len(gloo_threads() - before) <= 3
    for engine in engines:
        engine.destroy()
    assert all_end(before)


def test_a_layout_that_is_left_leaves_the_worlds_threads_alone(before: set[str]) -> None:
    for _ in range(3):
        groups.initialize(ParallelConfig())
        groups.leave_layout()
        assert 0 < len(gloo_threads() - before) <= 3
    groups.destroy()
    assert all_end(before)


def test_a_transport_that_is_aborted_leaves_no_thread(before: set[str]) -> None:
    store, transports = HashStore(), []

    def join(rank: int) -> None:
        transports.append(GlooTransport(store, "127.0.0.1", rank, 2, 300.0))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert gloo_threads() - before
    for transport in transports:
        transport.abort()
    assert all_end(before)
