"""Runs whose servers are killed: no prompt lost, none twice, the bound on staleness kept, and an end in any case."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from tests.e2e.test_main_job import Command, steps_in

KILL_EVERY_S = 5.0
SMALL = [
    "+experiment=gsm8k_grpo", "evaluator.every_steps=0", "evaluator.at_start=false", "server.n_servers=2",
    "train_dataset.batch_size=2", "algorithm.n_minibatches=1", "gconfig.n_samples=4", "gconfig.max_new_tokens=24",
    "saver.export_hf=false",
]  # fmt: skip


def servers_of(command: Command) -> dict[str, psutil.Process]:
    """The servers' own processes, not those that they start, by the name of their file of arguments."""
    found = {}
    for process in psutil.Process(command.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, or not yet reaped
            line = process.cmdline()
            if "megarl.rollout.sglang_server" in line:
                found[Path(line[-1]).name] = process
    return found


def in_service(run: RunFolder) -> list[str]:
    """Names of the servers that serve weights which a trainer has brought."""
    found = []
    for path in sorted(run.logs.glob("sglang-*.yaml")):
        arguments = json.loads(path.read_text())
        connection = http.client.HTTPConnection(arguments["host"], arguments["port"], timeout=2)
        try:
            connection.request("GET", "/model_info", headers={"Authorization": f"Bearer {arguments['api-key']}"})
            if json.load(connection.getresponse())["weight_version"] != "0":
                found.append(path.name)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
    return found


def prompts_of(run: RunFolder) -> list[int]:
    return [int(json.loads(line)["prompt_id"]) for line in (run.path / "episodes.jsonl").read_text().splitlines()]


def assert_every_prompt_is_accounted_for(run: RunFolder) -> None:
    """Each prompt that was read is trained on, rejected or still to be done, and just one of these."""
    done = prompts_of(run)
    last = sorted(run.checkpoints.iterdir())[-1]
    state = json.loads((last / "trainer.json").read_text())["parts"]["rollouts"]
    waiting = [entry["number"] for entry in state["waiting"]]
    rejected = [int(entry["prompt_id"]) for entry in state["rejected"]]
    assert sorted([*done, *waiting, *rejected]) == list(range(state["read"]))


@pytest.mark.timeout(300)
def test_servers_killed_every_5_seconds_for_50_steps_lose_and_repeat_no_prompt(tmp_path: Path) -> None:
    command = Command(
        tmp_path, *SMALL, "total_train_steps=50", "reshard.on_failure=drop_server", "server.max_restarts=1000",
        "rollout.max_head_offpolicyness=1", "rollout.retry_delay_s=0.05",
    )  # fmt: skip
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    command.wait_for(lambda: len(steps_in(run)) >= 1, "first step")
    killed: list[str] = []
    started = time.monotonic()
    while command.process.poll() is None and time.monotonic() - started < 240:
        up = in_service(run)
        if len(up) == 2:  # one goes on, or no step would ever end
            killed.append(up[len(killed) % 2])
            servers_of(command)[killed[-1]].kill()
        time.sleep(KILL_EVERY_S)
    assert command.wait() == 0, command.output.read_text()[-3000:]
    rows = read_metrics(run.metrics)
    assert [int(row["step"]) for row in rows] == list(range(1, 51))
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    assert max(row["train/logprob_diff_max"] for row in rows) <= 1e-3
    assert killed, "the run ended before a server was killed"
    assert_every_prompt_is_accounted_for(run)
    print(f"{len(killed)} kills, {len(rows) / (time.monotonic() - started):.2f} steps/s")


@pytest.mark.timeout(300)
def test_a_resumed_run_keeps_the_bound_on_staleness_and_ends_when_all_servers_die(tmp_path: Path) -> None:
    arguments = [*SMALL, "rollout.max_head_offpolicyness=2", "server.max_restarts=0", "total_train_steps=1000"]
    first = Command(tmp_path, *arguments)
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    first.wait_for(lambda: len(steps_in(run)) >= 3, "third step")
    os.killpg(first.process.pid, signal.SIGTERM)
    assert first.wait() == 0, first.output.read_text()[-3000:]
    assert_every_prompt_is_accounted_for(run)
    stopped = len(steps_in(run))

    second = Command(tmp_path, *arguments, f"resume={run.path}")
    second.wait_for(lambda: len(steps_in(run)) >= stopped + 4, "four steps after the resume")
    rows = read_metrics(run.metrics)
    assert 0 < max(row["rollout/staleness_max"] for row in rows) <= 2
    done = prompts_of(run)
    assert len(done) == len(set(done))

    for server in servers_of(second).values():
        server.kill()
    assert second.process.wait(30) == 1
    assert "ServerError: SGLang server" in second.output.read_text()
