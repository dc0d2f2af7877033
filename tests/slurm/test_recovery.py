"""A supervised job that is stopped before its time limit, requeued, and loses a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from virtual_cluster import ROOT, Cluster

STEPS = 240
DATA = ("path=arithmetic", "name=main", "type=gsm8k", "max_length=64", "split=train")
OVERRIDES = [
    *(f"{name}.{knob}" for name in ("train_dataset", "valid_dataset") for knob in DATA),
    *(
        "model=tiny",
        "data.chat_template=''",
        "data.on_bad_row=error",
        "actor.init=checkpoint",
        "parallel.tp_size=1",
        "parallel.dp_size=2",
    ),
    *("parallel.sequence_parallel=false", "cluster.gpus_per_node=1", "train_dataset.batch_size=16"),
    *("actor.optimizer.warmup_steps=0", "actor.max_tokens_per_mb=2048", "evaluator.every_steps=0"),
    *(f"total_train_steps={STEPS}", "saver.every_steps=10", "valid_dataset.split='test[:32]'"),
]
WAIT_S = 480.0


def losses(folder: Path) -> dict[int, float]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {row["step"]: row["train/loss"] for row in rows}


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_disturbed_job_computes_what_an_undisturbed_run_does(slurm: Cluster) -> None:
    job = slurm.sbatch("sft.sh", ["--nodes=2"], OVERRIDES)
    folder = slurm.folder / "runs" / "sft_8b" / f"job_{job}"

    def at_step(more: int) -> None:
        goal = max(losses(folder), default=0) + more
        slurm.reaches(job, lambda: max(losses(folder), default=0) >= goal, WAIT_S, f"step {goal}")

    def attempt(number: int) -> None:
        logs = folder / "logs" / f"attempt_{number}"
        slurm.reaches(job, logs.is_dir, WAIT_S, f"attempt {number}")

    at_step(5)
    slurm("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    attempt(2)
    assert "stopped after step" in (folder / "logs" / "attempt_1" / "rank_0.log").read_text()
    at_step(5)
    slurm("scontrol", "requeue", job)
    attempt(3)
    at_step(15)  # past a checkpoint
    slurm.kill_node("node1")
    slurm.reaches(job, lambda: "node1 starts no task" in slurm.output(job), WAIT_S, "the failed node's name")
    slurm.give_up_node("node1")
    slurm.until(lambda: slurm.field(job, "ExcNodeList") == "node1", WAIT_S, lambda: slurm.output(job))
    attempt(4)
    assert "node1" not in slurm("scontrol", "show", "hostnames", slurm.field(job, "NodeList")).split()
    assert slurm.ended(job, WAIT_S) == "COMPLETED"
    assert slurm.left(job) == []
    slurm.start_node("node1")

    undisturbed = slurm.folder / "undisturbed"
    done = subprocess.run(
        [sys.executable, "-m", "megarl.train", "+experiment=sft_8b", *OVERRIDES, f"run_root={undisturbed}"],
        env=slurm.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stderr
    expected = losses(undisturbed / "sft_8b" / "latest")
    assert len(expected) == STEPS
    assert losses(folder) == expected


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_job_of_the_launcher_that_is_cancelled_stops_in_order_and_leaves_nothing_behind(slurm: Cluster) -> None:
    launcher = [sys.executable, "-m", "megarl.launcher.slurm", "+experiment=sft_8b", *OVERRIDES]
    job = slurm(*launcher, "total_train_steps=100000").split()[-1]  # "Submitted batch job 7"
    assert slurm.field(job, "NumNodes") in ("2", "2-2")  # the second while it waits
    folder = slurm.folder / "runs" / "sft_8b" / f"job_{job}"
    slurm.reaches(job, lambda: losses(folder), WAIT_S, "step 1")
    slurm("scancel", job)
    assert slurm.ended(job, WAIT_S) == "CANCELLED"
    slurm.until(lambda: not slurm.left(job), WAIT_S, lambda: f"the end of {slurm.left(job)}")
    assert max(p.name for p in (folder / "checkpoints").iterdir()) == f"step_{max(losses(folder)):06d}"
    assert slurm.field(job, "Restarts") == "0"
