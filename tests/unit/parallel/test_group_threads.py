"""Process groups end with what made them: no thread of gloo outlives an engine or a transport."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.reshard.transfer.transports.gloo import GlooTransport


def gloo_threads() -> int:
    """Number of gloo's threads in this process, without groups that are garbage."""
    gc.collect()
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ends meanwhile
            names.append((task / "comm").read_text())
    return sum("gloo" in name for name in names)


def fall_to(count: int) -> bool:
    """Waits until so many threads of gloo are left: one of a closed group takes a moment to end."""
    deadline = time.monotonic() + 300
    while gloo_threads() != count and time.monotonic() < deadline:
        time.sleep(0.05)
    return gloo_threads() == count


@pytest.fixture
def before() -> int:
    """Number of gloo's threads once those of earlier tests have ended: it stays the same for a second."""
    groups.destroy()
    counts = [gloo_threads()]
    while len(counts) < 5 or len(set(counts[-5:])) > 1:
        time.sleep(0.25)
        counts.append(gloo_threads())
    return counts[-1]


@pytest.mark.cpu_options("the world's backend is gloo")
def test_a_lone_engine_has_one_group_and_leaves_no_thread(before: int, checkpoints: Callable[..., Path]) -> None:
    engine = MegatronEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True))))
    for _ in range(3):
        engine.initialize()
        assert 0 < gloo_threads() - before <= 3  # one group: a loop, and two workers
        engine.destroy()
        assert fall_to(before)


def test_two_engines_of_a_process_share_the_group(before: int, checkpoints: Callable[..., Path]) -> None:
    path = str(checkpoints("qwen3", tied=True))
    engines = [MegatronEngine(EngineConfig(path=path)), MegatronEngine(EngineConfig(path=path), trainable=False)]
    for engine in engines:
        engine.initialize()
    assert 0 < gloo_threads() - before <= 3
    for engine in engines:
        engine.destroy()
    assert fall_to(before)


def test_a_layout_that_is_left_leaves_the_worlds_threads_alone(before: int) -> None:
    for _ in range(3):
        groups.initialize(ParallelConfig())
        groups.leave_layout()
        assert 0 < gloo_threads() - before <= 3
    groups.destroy()
    assert fall_to(before)


def test_a_transport_that_is_aborted_leaves_no_thread(before: int) -> None:
    store, transports = HashStore(), []

    def join(rank: int) -> None:
        transports.append(GlooTransport(store, "127.0.0.1", rank, 2, 300.0))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert gloo_threads() > before
    for transport in transports:
        transport.abort()
    assert fall_to(before)
