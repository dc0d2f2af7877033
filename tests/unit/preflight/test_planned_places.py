"""The transport that `auto` will take is said before a run, by the machines as they are planned."""

from __future__ import annotations

import pytest

from megarl import cli
from megarl.knobs import UserError
from megarl.preflight.planned_places import planned_transports, planned_world

GRPO = "+experiment=gsm8k_grpo"
MAPPED = "cuda_ipc on the trainer's machine, which maps GPU memory"


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ([], "gloo to 2 servers: trainer rank 0 has no GPU"),
        (["cluster.gpus_per_node=8"], f"cuda_ipc to 2 servers: {MAPPED}"),
        (["cluster.gpus_per_node=2"], "nccl to 2 servers: nccl between GPUs of their own"),
        (["cluster.gpus_per_node=2", "server.colocate=true"], f"cuda_ipc to 2 servers: {MAPPED}"),
        (["cluster.gpus_per_node=8", "server.device=cpu"], "gloo to 2 servers: rank 0 of server 0 has no GPU"),
        (["reshard.transport=shm"], "shm to 2 servers: reshard.transport=shm"),
        (["reshard.path=full"], "full tensors, broadcast by gloo"),
        (["reshard.transport=disk", "reshard.folder=w"], "full tensors, as files"),
    ],
)
def test_the_planned_machines_say_the_transport(knobs: list[str], expected: str) -> None:
    config = cli.composed([GRPO, "parallel.dp_size=2", "server.n_servers=2", *knobs])
    assert planned_transports(config) == expected


def test_a_transport_that_the_planned_machines_rule_out_is_refused() -> None:
    config = cli.composed([GRPO, "server.n_servers=2", "cluster.gpus_per_node=1", "reshard.transport=cuda_ipc"])
    with pytest.raises(UserError, match="stays on one machine, and trainer rank 0 is on node 0, rank 0 of server 0 on"):
        planned_transports(config)


def test_relays_that_the_planned_transport_does_not_reach_are_refused() -> None:
    config = cli.composed(
        [GRPO, "parallel.dp_size=2", "server.n_servers=3", "cluster.gpus_per_node=8", "reshard.relay=1"]
    )
    with pytest.raises(UserError, match=r"reshard.relay=1: the weights travel by cuda_ipc .*, which does not reach"):
        planned_transports(config)


def test_co_located_servers_are_planned_on_the_trainers_gpus() -> None:
    config = cli.composed([GRPO, "parallel.dp_size=2", "cluster.gpus_per_node=2", "server.colocate=true"])
    planned = planned_world(config)
    assert [rank["gpu"] for rank in planned["sources"]] == ["GPU 0", "GPU 1"]
    assert planned["servers"][0][0] == {"node": "node 0", "gpu": "GPU 0", "visible_gpus": ["GPU 0", "GPU 1"]}
