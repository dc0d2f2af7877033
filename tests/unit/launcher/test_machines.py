"""GPUs of ranks and servers."""

from __future__ import annotations

import pytest

from megarl import cli
from megarl.knobs import UserError
from megarl.launcher.machines import Machines, check_servers_fit, machines_of


def test_trainers_and_servers_share_no_node_unless_all_fit_on_one() -> None:
    one = machines_of(cli.composed(["+experiment=grpo_7b"]))
    assert (one.nodes, one.first_server_gpu) == (1, 6)
    many = machines_of(cli.composed(["+experiment=grpo_70b"]))
    assert (many.nodes, many.first_server_gpu) == (12, 64)


def test_without_gpus_all_processes_are_on_one_node() -> None:
    machines = machines_of(cli.composed(["+experiment=gsm8k_grpo", "server.n_servers=3", "parallel=dp2"]))
    assert (machines.gpus_per_node, machines.nodes, machines.first_server_gpu) == (5, 1, 2)


SERVED = ["+experiment=opd", "teacher.source=server", "algorithm.divergence=top_k", "teacher.n_servers=2"]


def test_a_teacher_that_the_run_starts_has_gpus_after_the_servers() -> None:
    gpus = ["teacher.tp_size=2", "parallel.dp_size=2", "cluster.gpus_per_node=8"]
    machines = machines_of(cli.load([*SERVED, *gpus]))
    assert (machines.teachers, machines.teacher_tp, machines.first_teacher_gpu, machines.nodes) == (2, 2, 3, 1)
    assert machines_of(cli.load([*SERVED, "teacher.tp_size=2"])).gpus_per_node == 1 + 1 + 2 * 2  # no GPUs: processes
    elsewhere = machines_of(cli.load([*SERVED, *gpus, "teacher.addresses=[10.0.0.1:1]"]))
    assert (elsewhere.teachers, elsewhere.nodes) == (0, 1)
    supervised = machines_of(cli.load([*SERVED, *gpus, "method=sft"]))
    assert supervised.first_teacher_gpu == 2
    assert Machines(8, 2, 1, 4, teachers=1, teacher_tp=4).nodes == 2


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (Machines(8, 8, 1, 16), "server.tp_size=16 exceeds cluster.gpus_per_node=8: a server is on one node"),
        (Machines(8, 8, 2, 3), "server.tp_size=3 does not divide cluster.gpus_per_node=8"),
    ],
)
def test_a_server_that_spans_two_nodes_is_refused(machines: Machines, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_servers_fit(machines)


@pytest.mark.parametrize("machines", [Machines(8, 8, 0, 16), Machines(8, 8, 1, 3), Machines(8, 2, 2, 3)])
def test_servers_on_one_node_each_pass(machines: Machines) -> None:
    check_servers_fit(machines)
