"""Runs whose servers are killed: no prompt lost, none twice, the bound on staleness kept, and an end in any case."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.rollout.servers.sglang_server import answers_at
from tests.e2e.test_main_job import DEADLINE_S, Command, steps_in

KILL_EVERY_S = float(os.environ.get("MEGARL_KILL_EVERY_S", "5"))
STEPS = int(os.environ.get("MEGARL_KILLED_STEPS", "20"))  # at least; 50 for the figure in docs/numbers.md
LIMIT_S = 60.0 * STEPS  # each step may wait for a server to start
SMALL = [
    "+experiment=gsm8k_grpo", "evaluator.every_steps=0", "evaluator.at_start=false", "server.n_servers=2",
    "train_dataset.batch_size=4", "algorithm.n_minibatches=1", "gconfig.n_samples=8", "gconfig.max_new_tokens=24",
    "saver.export_hf=false",
]  # fmt: skip


def servers_of(command: Command) -> dict[str, psutil.Process]:
    """The servers' own processes, not those that they start, by the name of their file of arguments."""
    found = {}
    for process in psutil.Process(command.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile, or not yet reaped
            line = process.cmdline()
            if "megarl.rollout.servers.sglang_server" in line:
                found[Path(line[-1]).name] = process
    return found


def answering(run: RunFolder) -> list[str]:
    """Names of the servers that live and answer, with or without the trainer's weights."""
    found = []
    for path in sorted(run.logs.glob("sglang-*.yaml")):
        arguments = json.loads(path.read_text())
        if answers_at(f"{arguments['host']}:{arguments['port']}", arguments["api-key"], 2.0):
            found.append(path.name)
    return found


def kill_in_turn(command: Command, run: RunFolder, every_s: float) -> list[tuple[str, int]]:
    """Kills -9 a server that answers every `every_s` seconds, the one that was killed longest ago, until `STEPS` steps
    are done, servers were brought back and the last one left was killed too. Returns who was killed, and how many were
    left then.

    A moment passes at which none answers, or but one and no step was done since the last kill: servers that serve
    alone for seconds may do none on a slow machine.
    """
    killed: list[tuple[str, int]] = []
    steps_then = 0
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        steps, up = len(steps_in(run)), answering(run)
        if len(up) > 1 or (up and steps > steps_then):
            last = {name: i for i, (name, _) in enumerate(killed)}
            name = min(up, key=lambda name: last.get(name, -1))
            if (process := servers_of(command).get(name)) is not None:
                process.kill()
                killed.append((name, len(up) - 1))
                steps_then = steps
        time.sleep(every_s)
        assert command.process.poll() is None, command.output.read_text()[-3000:]
        rows = read_metrics(run.metrics)
        back = sum(row.get("sync/servers_brought_back", 0) for row in rows)
        if len(rows) >= STEPS and back >= 2 and any(left == 0 for _, left in killed):
            return killed
    raise AssertionError(f"{len(steps_in(run))} steps in {LIMIT_S:g} s:\n{command.output.read_text()[-3000:]}")


def episodes_of(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "episodes.jsonl").read_text().splitlines()]


def assert_every_prompt_is_accounted_for(run: RunFolder) -> None:
    """Each prompt that was read is trained on, rejected or still to be done, and just one of these."""
    done = [int(episode["prompt_id"]) for episode in episodes_of(run)]
    last = sorted(run.checkpoints.iterdir())[-1]
    state = json.loads((last / "trainer.json").read_text())["parts"]["rollouts"]
    waiting = [entry["number"] for entry in state["waiting"]]
    rejected = [int(entry["prompt_id"]) for entry in state["rejected"]]
    assert sorted([*done, *waiting, *rejected]) == list(range(state["read"]))


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """`begin(argument, ...)`: the command with `SMALL` and these arguments, ended with the test."""
    begun: list[Command] = []

    def start(*arguments: str) -> Command:
        begun.append(Command(tmp_path, *SMALL, *arguments))
        return begun[-1]

    yield start
    for command in begun:
        command.kill()


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + DEADLINE_S)
@pytest.mark.parametrize("beside", ["false", "true"])
def test_a_server_killed_every_5_seconds_costs_no_prompt_and_repeats_none(
    begin: Callable[..., Command], tmp_path: Path, beside: str
) -> None:
    """`beside`: the next batch is scored while the servers receive the weights."""
    command = begin(
        "total_train_steps=100000", "server.max_restarts=1000", "rollout.max_head_offpolicyness=1",
        f"reshard.overlap_scoring={beside}",
    )  # fmt: skip
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    command.wait_for(lambda: len(steps_in(run)) >= 1, "first step")
    before, started = len(steps_in(run)), time.time()
    killed = kill_in_turn(command, run, KILL_EVERY_S)
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.wait() == 0, command.output.read_text()[-3000:]
    rows = read_metrics(run.metrics)
    seconds, done = rows[-1]["time"] - started, len(rows) - before
    last_ones = sum(left == 0 for _, left in killed)
    print(
        f"{len(killed)} kills, {last_ones} of them of the last server left, in {seconds:.0f} s and {done} steps: "
        f"{done / seconds:.2f} steps/s, {32 * done / seconds:.1f} completions/s"
    )
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    trained = [episode for episode in episodes_of(run) if "samples" in episode]
    assert [episode["samples"] + sum(episode.get("dropped", {}).values()) for episode in trained] == [8] * 4 * len(rows)
    assert_every_prompt_is_accounted_for(run)
    assert max(row["rollout/staleness_max"] for row in rows) <= 1
    assert max(row.get("train/logprob_diff_max", 0.0) for row in rows) <= 1e-3
    # A server that was started again holds the checkpoint, as version 0: the bound on staleness says that no token of
    # it was trained on. In the sync that brought it back every piece of it was proven by digests, as of the other.
    synced = [row for row in rows if "sync/verified_parts" in row]  # beside the next scoring: all but the first
    assert len({round(row["sync/verified_parts"] / row["sync/servers"], 6) for row in synced}) == 1


@pytest.mark.long
def test_a_resumed_run_keeps_the_bound_on_staleness_and_ends_when_all_servers_die(
    begin: Callable[..., Command], tmp_path: Path
) -> None:
    arguments = ["rollout.max_head_offpolicyness=2", "server.max_restarts=0", "total_train_steps=1000"]
    first = begin(*arguments)
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    first.wait_for(lambda: len(steps_in(run)) >= 3, "third step")
    os.killpg(first.process.pid, signal.SIGTERM)
    assert first.wait() == 0, first.output.read_text()[-3000:]
    assert_every_prompt_is_accounted_for(run)
    stopped = len(steps_in(run))

    second = begin(*arguments, f"resume={run.path}")
    second.wait_for(lambda: len(steps_in(run)) >= stopped + 4, "four steps after the resume")
    rows = read_metrics(run.metrics)
    assert 0 < max(row["rollout/staleness_max"] for row in rows) <= 2
    done = [episode["prompt_id"] for episode in episodes_of(run)]
    assert len(done) == len(set(done))

    for server in servers_of(second).values():
        server.kill()
    assert second.process.wait(300) == 1
    assert "ServerError: SGLang server" in second.output.read_text()
