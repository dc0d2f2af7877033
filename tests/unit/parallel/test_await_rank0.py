"""Other ranks wait for rank 0 on the host, where NCCL would keep their GPUs busy."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from megarl.parallel import broadcast, platform, watchdog


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Two ranks on a device that is no CPU, as threads; the rank is the thread's name. Their store is a real one."""
    store = HashStore()
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: int(threading.current_thread().name == "other"))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


def test_another_rank_waits_until_rank_0_comes_and_says_so(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_recorder", watchdog._Recorder(tmp_path, 1))
    monitor = watchdog.Monitor(tmp_path, 2, 60.0)
    for number in range(2):
        monkeypatch.setattr(broadcast, "_meetings", iter([number, number]))
        other = threading.Thread(target=broadcast.await_rank0, args=(300.0,), name="other")
        other.start()
        deadline = time.monotonic() + 300
        while "waits in collective" not in monitor.describe(1):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert other.is_alive()
        broadcast.await_rank0(300.0)
        other.join(300)
        assert not other.is_alive()
        assert monitor.describe(1).endswith(f"past collective {number + 1}, await_rank0")


def test_a_wait_has_a_deadline(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            broadcast.await_rank0(0.05)
        except TimeoutError as error:
            errors.append(error)

    other = threading.Thread(target=wait, name="other")
    other.start()
    other.join(300)
    assert [str(error) for error in errors] == ["rank 0 did not come within 0.05 s"]
