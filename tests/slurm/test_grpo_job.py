"""`sbatch slurm/grpo_70b.sh` on a real Slurm: the recipe, with its model and its batch shrunk by overrides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from virtual_cluster import Cluster, steps_of

OVERRIDES = [
    *("model=tiny", "data=arithmetic", "parallel.tp_size=2", "parallel.pp_size=1", "parallel.cp_size=1"),
    *("parallel.dp_size=1", "cluster.gpus_per_node=1", "server.n_servers=1", "server.tp_size=1"),
    *("train_dataset.batch_size=8", "gconfig.n_samples=4", "gconfig.max_new_tokens=24", "algorithm.n_minibatches=1"),
    *("actor.optimizer.warmup_steps=0", "actor.max_tokens_per_mb=2048", "evaluator.every_steps=0"),
]
NODES = ["--nodes=3", "--gpus-per-node=1"]  # two for a rank each, one for the server
STEPS, START_S, END_S = 14, 480.0, 240.0


@pytest.mark.timeout(2400)
@pytest.mark.long
def test_a_job_trains_through_a_dead_server_and_a_requeue(slurm: Cluster) -> None:
    job = slurm.sbatch("grpo_70b.sh", NODES, [*OVERRIDES, f"total_train_steps={STEPS}", "saver.every_steps=1"])
    folder = slurm.folder / "runs" / "grpo_70b" / f"job_{job}"
    slurm.reaches(job, lambda: len(steps_of(folder)) >= 1, START_S, "step 1")
    nodes = ("node0", "node1", "node2")
    assert [slurm.tasks(job, node, "megarl.train") for node in nodes] == [1, 1, 0]
    assert [slurm.tasks(job, node, "megarl.launcher.server_task") for node in nodes] == [0, 0, 1]
    assert slurm.listening(job) == {"127.0.0.1"}
    killed = len(steps_of(folder))
    slurm.kill_sglang(job)  # its task restarts it, and the trainer sends it the weights
    goal = killed + 2
    slurm.reaches(job, lambda: len(steps_of(folder)) >= goal, START_S, f"step {goal}")
    assert sum(row["sync/servers_brought_back"] for row in steps_of(folder)) >= 1  # a busy machine may miss a heartbeat
    slurm("scontrol", "requeue", job)
    slurm.until(lambda: slurm.field(job, "JobState") == "PENDING", END_S, "the requeue")
    assert slurm.left(job) == []
    before = steps_of(folder)
    assert slurm.ended(job, START_S + END_S) == "COMPLETED"
    assert slurm.field(job, "ExitCode") == "0:0"
    assert slurm.left(job) == []
    assert [p.name for p in sorted((folder / "logs").glob("attempt_*"))] == ["attempt_1", "attempt_2"]
    assert (folder / "logs" / "latest").readlink() == Path("attempt_2")
    after = steps_of(folder)
    assert [row["step"] for row in after] == [*range(1, STEPS + 1)]
    assert after[: len(before)] == before
    assert all(row["sync/verified"] == 1 for row in after)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["weights_verified"], summary["stopped_early"]) == (STEPS, STEPS, False)
    episodes = [json.loads(line)["prompt_id"] for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == len(set(episodes)) == STEPS * 8  # each prompt once, over both attempts


@pytest.mark.parametrize(
    ("override", "why"),
    [
        pytest.param(
            "algorithm.n_minibatches=3", "do not divide into algorithm.n_minibatches=3", marks=pytest.mark.long
        ),
        ("server.n_servers=9", "the run needs 11 nodes of cluster.gpus_per_node=1, and this allocation has 3"),
    ],
)
def test_preflight_refuses_before_anything_starts(slurm: Cluster, override: str, why: str) -> None:
    job = slurm.sbatch("grpo_70b.sh", NODES, [*OVERRIDES, override])
    assert slurm.ended(job, END_S) == "FAILED"
    assert slurm.field(job, "ExitCode") == "1:0"
    assert why in slurm.output(job)
    assert not (slurm.folder / "runs" / "grpo_70b" / f"job_{job}").exists()
    assert "srun" not in slurm.output(job)
