"""Two jobs on one node, as docs/operations.md says: each with half of it, and neither meets the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from virtual_cluster import ROOT, Cluster, steps_of

OVERRIDES = [
    *("model=tiny", "data=arithmetic", "parallel.pp_size=1", "parallel.dp_size=1"),
    *("parallel.first_stage_layers=0", "parallel.last_stage_layers=0"),
    *("cluster.gpus_per_node=4", "server.n_servers=1", "server.tp_size=1", "rollout.max_connections=64"),
    *("train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=16", "algorithm.n_minibatches=1"),
    *("actor.optimizer.warmup_steps=0", "actor.max_tokens_per_mb=2048", "evaluator.every_steps=0"),
    *("saver.every_steps=0", "total_train_steps=12"),
]
WAIT_S = 600.0


def half_of_a_node(folder: Path) -> Path:
    """A copy of a template with the page's lines for half of a node of 64 cores, as the virtual nodes have 16."""
    page = (ROOT / "docs" / "operations.md").read_text()
    block = re.search(r"## Two jobs on one node.*?```bash\n(.*?)```", page, re.DOTALL)
    assert block is not None
    lines = block[1].replace("--cpus-per-task=8", "--cpus-per-task=2")
    template = (ROOT / "slurm" / "grpo_7b.sh").read_text()
    without = re.sub(r"#SBATCH --(exclusive|mem=0|gpus-per-node=8)\n", "", template)
    assert without.count("#SBATCH") == template.count("#SBATCH") - 3
    script = folder / "half.sh"
    script.write_text(without.replace("#SBATCH --time", lines + "#SBATCH --time", 1))
    return script


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_two_jobs_on_a_node_have_their_own_gpus_addresses_and_folders(slurm: Cluster, tmp_path: Path) -> None:
    script = half_of_a_node(tmp_path)
    jobs = [slurm("sbatch", "--parsable", "--nodelist=node0", str(script), *OVERRIDES).strip() for _ in range(2)]
    folders = [slurm.folder / "runs" / "grpo_7b" / f"job_{job}" for job in jobs]

    def both_train() -> bool:
        return all(len(steps_of(folder)) > 0 for folder in folders)

    slurm.reaches(jobs[0], both_train, WAIT_S, "a step of both jobs")
    assert [slurm.field(job, "JobState") for job in jobs] == ["RUNNING"] * 2
    assert [slurm.field(job, "NodeList") for job in jobs] == ["node0"] * 2
    gpus = [slurm.gpus(job) for job in jobs]
    assert [len(each) for each in gpus] == [4, 4], gpus
    assert not gpus[0] & gpus[1], gpus
    ports = [slurm.listening_ports(job) for job in jobs]
    assert not ports[0] & ports[1]
    for job, folder in zip(jobs, folders, strict=True):
        assert slurm.ended(job, WAIT_S) == "COMPLETED", slurm.output(job)
        assert slurm.left(job) == []
        rows = steps_of(folder)
        assert [row["step"] for row in rows] == [*range(1, 13)]
        assert all(row["sync/verified"] == 1 and row["sync/servers"] == 1 for row in rows)
