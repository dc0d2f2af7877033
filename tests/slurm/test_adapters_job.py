"""A job of several adapters on a real Slurm, requeued in the middle."""

from __future__ import annotations

import json

import pytest
from test_grpo_job import END_S, NODES, OVERRIDES, START_S
from virtual_cluster import Cluster, steps_of

from megarl.observe.run_folder import RunFolder


@pytest.mark.timeout(2400)
@pytest.mark.long
def test_a_job_trains_several_adapters_through_a_requeue(slurm: Cluster) -> None:
    knobs = [
        *OVERRIDES, "actor.lora.rank=4", "actor.lora.sync=adapters", "total_train_steps=12", "saver.every_steps=1",
        "+adapters.a=[]", '+adapters.b=["seed=2","total_train_steps=10"]',
    ]  # fmt: skip
    job = slurm.sbatch("grpo_70b.sh", NODES, knobs)
    folder = RunFolder(slurm.folder / "runs" / "grpo_70b" / f"job_{job}")

    def steps(name: str) -> list[float]:
        return [row["step"] for row in steps_of(folder.adapter(name).path)]

    slurm.reaches(job, lambda: len(steps("b")) >= 3, START_S, "step 3")
    slurm("scontrol", "requeue", job)
    slurm.until(lambda: slurm.field(job, "JobState") == "PENDING", END_S, "the requeue")
    before = {name: steps_of(folder.adapter(name).path) for name in ("a", "b")}
    assert slurm.ended(job, START_S + END_S) == "COMPLETED"
    for name, count in (("a", 12), ("b", 10)):
        rows = steps_of(folder.adapter(name).path)
        assert [row["step"] for row in rows] == [*range(1, count + 1)]
        assert rows[: len(before[name])] == before[name], "the second attempt repeats no step"
        assert all(row["sync/verified"] == 1 for row in rows)
        assert json.loads(folder.adapter(name).summary.read_text())["steps"] == count
