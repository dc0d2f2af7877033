"""The same runs under other launchers, by the real commands: Ray on a cluster of its own, and a training script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.parallel.watchdog import Monitor
from megarl.rollout.servers.sglang_server import still_running
from tests.e2e.test_main_job import Command, steps_in
from tests.launched import ARGUMENTS, STEPS, losses, losses_of_the_local_launcher

ROOT = Path(__file__).parents[2]


def listeners(family: list[psutil.Process]) -> set[str]:
    """The addresses that these processes listen on."""
    found = []
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has just ended
            found += [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {address.removeprefix("::ffff:") for address in found}


@pytest.fixture(scope="module", autouse=True)
def no_cluster_is_given() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.mark.long
def test_ray_gives_the_local_losses_and_a_killed_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: make setup installs it")
    command = Command(tmp_path / "ray", *ARGUMENTS, "total_train_steps=100000", "launcher=ray")
    run = RunFolder(tmp_path / "ray" / "gsm8k_sft" / "latest")
    command.wait_for(lambda: len(losses(run)) == STEPS, "third step")
    records = Monitor(run.logs / "attempt_1" / "job" / "watch", 2, 600.0)
    command.wait_for(lambda: "start" not in records.describe(1), "record of a step")  # one is flushed every 5 s
    family = command.family()
    assert listeners(family) == {"127.0.0.1"}
    ranks = {}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "megarl.train" in process.cmdline():
                ranks[process.environ()["RANK"]] = process
    ranks["1"].kill()
    assert command.wait() not in (0, None)
    text = command.output.read_text()
    assert re.search("megarl: rank 1 was killed by SIGKILL (in stage (?!start)|after )", text), text[-3000:]
    assert still_running(family, 300) == []
    assert losses(run) == losses_of_the_local_launcher(tmp_path / "local")


@pytest.mark.long
def test_ray_runs_ranks_and_a_server_and_ctrl_c_ends_all_in_order(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: make setup installs it")
    command = Command(
        tmp_path, "+experiment=gsm8k_grpo", "train_dataset.batch_size=4", "evaluator.every_steps=0", "launcher=ray",
        "evaluator.at_start=false", "evaluator.at_end=false", "saver.export_hf=false", "logger.tensorboard=false",
        "total_train_steps=100000",
    )  # fmt: skip
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    command.wait_for(lambda: len(steps_in(run)) >= 2, "second step")
    shown = subprocess.run(
        [sys.executable, "-m", "megarl.launcher.status", str(run.path)], capture_output=True, text=True, timeout=900
    )
    family = command.family()
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does
    assert command.wait() == 0, command.output.read_text()[-3000:]
    summary = json.loads(run.summary.read_text())
    assert summary["stopped_early"]
    assert summary["weights_verified"] == summary["steps"] >= 2
    assert still_running(family, 300) == []
    assert shown.returncode == 0, shown.stderr
    assert "rank" in shown.stdout


SLOW_ONCE = """
import os, time
if "dashboard/agent.py" in open("/proc/self/cmdline").read() and not os.path.exists(os.environ["SLOW_ONCE"]):
    os.mkdir(os.environ["SLOW_ONCE"])
    time.sleep(25)
"""


@pytest.mark.long
def test_a_cluster_of_a_machine_that_was_busy_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own agent takes 25 s once; Ray gives it 15 s. Every process of Python runs `sitecustomize.py` first."""
    pytest.importorskip("ray", reason="ray is not installed: make setup installs it")
    (tmp_path / "sitecustomize.py").write_text(SLOW_ONCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SLOW_ONCE", str(tmp_path / "was slow"))
    command = Command(tmp_path / "ray", *ARGUMENTS, f"total_train_steps={STEPS}", "launcher=ray")
    assert command.wait() == 0, command.output.read_text()[-3000:]
    assert "ray       its cluster is not up, start 2 of 3 follows: The current node timed" in command.output.read_text()
    assert len(losses(RunFolder(tmp_path / "ray" / "gsm8k_sft" / "latest"))) == STEPS


@pytest.mark.long
def test_a_training_script_runs_beside_servers_that_the_launcher_starts(tmp_path: Path) -> None:
    """The walk-through's loop: rollouts, log-probs, advantages, update, weights as files, versions."""
    script = [str(ROOT / "examples" / "gsm8k_grpo.py"), "--config", str(ROOT / "examples" / "gsm8k_grpo.yaml")]
    command = Command(
        tmp_path, *script, "parallel=dp2", "total_train_steps=2", "train_dataset.batch_size=4",
        "valid_dataset.split='test[:8]'", "algorithm.kl_coef=0.01", "logger.tensorboard=false",
        module="megarl.launcher.local",
    )  # fmt: skip
    assert command.wait() == 0, command.output.read_text()[-3000:]
    run = RunFolder(tmp_path / "gsm8k_grpo_script" / "latest")
    rows = read_metrics(run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sync/verified"] == 1 and row["train/skipped_steps"] == 0 for row in rows)
    samples = (run.path / "evaluations" / "step-000002.jsonl").read_text().splitlines()
    assert {json.loads(line)["versions"][0] for line in samples} == {2}
    assert (run.path / "hf" / "model.safetensors").exists()
    assert not list((run.path / "weights").iterdir())


@pytest.fixture(scope="module")
def on_three_nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What small programs on a cluster of three nodes of two counted GPUs left and printed."""
    pytest.importorskip("ray", reason="ray is not installed: make setup installs it")
    out = tmp_path_factory.mktemp("cluster")
    command = [sys.executable, "-m", "tests.e2e.ray_worker", str(out)]
    return out, subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)


@pytest.mark.long
def test_ranks_fill_the_nodes_of_a_cluster_in_their_order_and_see_their_gpus_alone(
    on_three_nodes: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, run = on_three_nodes
    assert "whole code 0" in run.stdout, run.stdout + run.stderr
    words = [(out / "whole" / f"rank_{rank}.log").read_text().split(maxsplit=3) for rank in range(3)]
    assert [w[:2] for w in words] == [["0", "0"], ["1", "0"], ["2", "0"]]
    assert {words[0][2], words[1][2]} == {"0", "1"}  # of one node
    assert {w[3] for w in words} == {"passed on\n"}
    server = (out / "whole" / "server_0.log").read_text().split()
    assert sorted(server[1].split(",")) == ["0", "1"]


def test_a_lost_actor_ends_the_run_with_its_name_and_no_room_is_one_line(
    on_three_nodes: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, run = on_three_nodes
    assert "lost code 70" in run.stdout, run.stdout + run.stderr
    assert "megarl: rank 1 was lost with its Ray actor (" in run.stderr
    assert "full refused the Ray cluster has no room for bundles of " in run.stdout
