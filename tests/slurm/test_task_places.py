"""Slurm puts tasks where the plan of a job assumes them: nodes are filled in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from virtual_cluster import ROOT, Cluster

SCRIPT = """#!/bin/bash
#SBATCH --nodes=3
#SBATCH --exclusive
source {job}
LOGS={folder} image_options=() image=()
step rank node0,node1{more} {tasks} {per_node} bash -c 'echo $SLURM_NODEID $SLURM_LOCALID'
"""


@pytest.mark.parametrize(("tasks", "per_node", "nodes"), [(12, 8, 2), (16, 8, 2), (5, 2, 3), (3, 1, 3)])
def test_tasks_fill_one_node_after_the_other(
    tasks: int, per_node: int, nodes: int, slurm: Cluster, tmp_path: Path
) -> None:
    """Else trainers and servers that share the last node would take the same GPUs there."""
    script = tmp_path / "job.sh"
    more = ",node2" if nodes == 3 else ""
    script.write_text(
        SCRIPT.format(job=ROOT / "slurm" / "job.sh", folder=tmp_path, more=more, tasks=tasks, per_node=per_node)
    )
    job = slurm("sbatch", "--parsable", "--nodelist=node[0-2]", f"--output={tmp_path}/out", str(script)).strip()
    assert slurm.ended(job, 300.0) == "COMPLETED", (tmp_path / "out").read_text()
    places = [tuple(map(int, (tmp_path / f"rank_{task}.log").read_text().split())) for task in range(tasks)]
    assert places == [(task // per_node, task % per_node) for task in range(tasks)]
