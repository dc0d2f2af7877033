"""Runs with co-located servers: real trainer, real SGLang, memory calls in their order, kills and a resume.

On the CPU the engines really give up their memory. SGLang's memory saver is for GPUs: without it the servers answer the
same calls and keep theirs.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from tests.e2e.test_main_job import Command, steps_in
from tests.e2e.test_server_faults import SMALL, assert_every_prompt_is_accounted_for, episodes_of, servers_of

COLOCATED = [*SMALL, "server.n_servers=1", "server.colocate=true", "saver.every_steps=2"]
CALLS = ("pause_generation", "release_memory_occupation", "resume_memory_occupation", "update_weights_from_tensor")
STEP = [*CALLS[:3], "pause_generation", CALLS[3], "resume_memory_occupation"]


def calls_of(run: RunFolder) -> list[str]:
    """Weight and memory calls of the first server's log, in order."""
    lines = re.findall(r'"POST /(\w+) HTTP', (run.logs / "sglang-0.log").read_text())
    return [name for name in lines if name in CALLS]


@pytest.mark.long
def test_servers_and_trainer_take_turns_and_every_sync_is_proven(tmp_path: Path) -> None:
    command = Command(tmp_path, *COLOCATED, "total_train_steps=4", "parallel.dp_size=2")
    assert command.wait() == 0, command.output.read_text()[-3000:]
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    rows = [row for row in read_metrics(run.metrics) if row["step"] > 0]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4]
    assert all(row["sync/verified"] == 1 for row in rows)
    assert max(row["train/logprob_diff_max"] for row in rows) <= 1e-3
    # The canary of a sync is compared when the trainer has its memory back, in the next step.
    assert ["sync/canary_logprob_diff_max" in row for row in rows] == [False, True, True, True]
    assert max(row.get("sync/canary_logprob_diff_max", 0.0) for row in rows) <= 1e-3
    assert_every_prompt_is_accounted_for(run)
    # Four updates, and one more turn around the checkpoint of step 2. After the last one the servers stay asleep.
    assert calls_of(run) == [*STEP * 5, *CALLS[:2]]


@pytest.mark.long
def test_a_killed_server_comes_back_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    first = Command(tmp_path, *COLOCATED, "total_train_steps=1000")
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    try:
        first.wait_for(lambda: len(steps_in(run)) >= 3, "third step")
        for server in servers_of(first).values():
            server.kill()
        killed_at = len(steps_in(run))
        first.wait_for(lambda: len(steps_in(run)) >= killed_at + 3, "steps after the kill")
        os.killpg(first.process.pid, signal.SIGTERM)
        assert first.wait() == 0, first.output.read_text()[-3000:]
    finally:
        first.kill()
    rows = [row for row in read_metrics(run.metrics) if row["step"] > 0]
    assert sum(row["sync/servers_brought_back"] for row in rows) >= 1
    stopped = len(rows)
    second = Command(tmp_path, *COLOCATED, f"total_train_steps={stopped + 3}", f"resume={run.path}")
    assert second.wait() == 0, second.output.read_text()[-3000:]
    rows = [row for row in read_metrics(run.metrics) if row["step"] > 0]
    assert [int(row["step"]) for row in rows] == list(range(1, stopped + 4))
    assert all(row["sync/verified"] == 1 for row in rows)
    assert max(row["train/logprob_diff_max"] for row in rows) <= 1e-3
    done = [episode["prompt_id"] for episode in episodes_of(run)]
    assert len(done) == len(set(done))
