"""Requests to a Ray cluster. Runs on one are in tests/e2e/test_launchers.py."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.knobs import UserError
from megarl.launcher import ray
from megarl.launcher.job import Job

ROOT = Path(__file__).parents[3]


def job(world_size: int, servers: int, server_gpus: int = 1, gpus_per_node: int = 0) -> Job:
    return Job(ROOT, ROOT, (), (), {}, world_size, servers, server_gpus, gpus_per_node, 60.0)


def test_ranks_fill_nodes_in_their_order_and_each_server_lies_on_one_node() -> None:
    ranks, servers = ray.bundles(job(20, 3, server_gpus=4, gpus_per_node=8))
    assert ranks == [{"CPU": 8, "GPU": 8}, {"CPU": 8, "GPU": 8}, {"CPU": 4, "GPU": 4}]
    assert servers == [{"CPU": 1, "GPU": 4}] * 3


def test_without_gpus_all_ranks_lie_on_one_node() -> None:
    assert ray.bundles(job(3, 1)) == ([{"CPU": 3}], [{"CPU": 1}])
    assert ray.bundles(job(1, 0)) == ([{"CPU": 1}], [])


def test_a_cluster_that_does_not_answer_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: make setup installs it")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv(ray.ADDRESS, f"127.0.0.1:{port}")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(UserError, match=f"RAY_ADDRESS=127.0.0.1:{port} does not answer"):
        ray.launch(job(1, 0))


def test_without_ray_one_line_says_how_to_install_what_pyproject_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in (*ray.OWN_CLUSTER, "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN", "MEGARL_INTERFACE"):
        monkeypatch.setenv(name, "")  # undone after the test
    monkeypatch.delenv(ray.ADDRESS, raising=False)
    with pytest.raises(UserError, match=f'pip install "{ray.PACKAGE}"'):
        ray.launch(job(1, 0))
    assert f'"{ray.PACKAGE}"' in (ROOT / "pyproject.toml").read_text()


def test_no_other_user_reaches_the_folder_of_a_ray_cluster_that_megarl_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray opens its folder to everybody. The stand-in for its start covers that, and nothing else of Ray."""
    modes: list[int] = []

    def init(_temp_dir: str, **_: object) -> None:
        os.makedirs(_temp_dir, exist_ok=True)
        os.chmod(_temp_dir, 0o777)
        modes.extend(path.stat().st_mode & 0o777 for path in (Path(_temp_dir), *Path(_temp_dir).parents[:1]))
        raise Exception("The current node timed out during startup.\nIt is slow.")  # as Ray itself does

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: None))
    tmp_path.chmod(0o755)  # like /tmp, open to all
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in (*ray.OWN_CLUSTER, "RAY_USAGE_STATS_ENABLED", "RAY_AUTH_TOKEN", "MEGARL_INTERFACE"):
        monkeypatch.setenv(name, "")  # undone after the test
    monkeypatch.delenv(ray.ADDRESS, raising=False)
    with pytest.raises(
        UserError,
        match=r"this machine \(3 starts\) does not come up; .*: The current node timed out during startup\. It is slow",
    ):
        ray.launch(job(1, 0))
    assert modes == [0o777, 0o700] * 3
    assert list(tmp_path.iterdir()) == []


def test_an_own_cluster_that_was_too_slow_is_started_again_and_one_that_is_given_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []

    def init(address: str) -> None:
        calls.append(address)
        if calls.count(address) == 1:
            raise Exception("The current node timed out during startup.\nIt is slow.")  # as Ray itself does

    module = SimpleNamespace(init=init, shutdown=lambda: calls.append("shutdown"))
    ray._start(module, {"address": "local"}, None)
    assert calls == ["local", "shutdown", "local"]
    shown = "its cluster is not up, start 2 of 3 follows: The current node timed out during startup. It is slow."
    assert capsys.readouterr().out == f"ray       {shown}\n"
    with pytest.raises(UserError, match=r"RAY_ADDRESS=10\.0\.0\.1:9 does not come up; see `ray status`: The current"):
        ray._start(module, {"address": "10.0.0.1:9"}, "10.0.0.1:9")
    assert calls[3:] == ["10.0.0.1:9"]


@pytest.mark.parametrize(
    ("given", "sharing", "threads"),
    [
        ({}, 1, str(len(os.sched_getaffinity(0)))),
        ({}, 10_000, "1"),
        ({}, 0, "None"),
        ({"OMP_NUM_THREADS": "3"}, 1, "3"),
    ],
)
def test_a_rank_has_its_share_of_the_cores_and_not_one_thread(
    given: dict[str, str], sharing: int, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets OMP_NUM_THREADS=1 for actors with one CPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    child, log = ray.Child(), tmp_path / "rank.log"
    code = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    assert child.start(["-c", code], given, str(log), str(tmp_path), sharing)[1] == ""
    assert child._process is not None
    assert child._process.wait(300) == 0
    assert log.read_text().strip() == threads
