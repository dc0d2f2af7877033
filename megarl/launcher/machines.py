"""The GPUs of a run's ranks and servers: trainers first, then servers, then the teacher's servers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.config import Config
from megarl.knobs import UserError
from megarl.teacher_checks import teacher_servers


@dataclass(frozen=True)
class Machines:
    """Numbers of ranks, and the first GPU of the servers. GPUs are counted from 0 over all nodes."""

    gpus_per_node: int
    trainers: int
    servers: int
    server_tp: int
    colocate: bool = False  # servers are on the trainers' GPUs
    teachers: int = 0  # servers of the teacher that the run starts, all on one node with the others
    teacher_tp: int = 1

    @property
    def trainer_nodes(self) -> int:
        return math.ceil(self.trainers / self.gpus_per_node)

    @property
    def shared(self) -> bool:
        """True if all servers fit beside the trainers, on the trainers' last node."""
        beside = 0 if self.colocate else self.trainers
        return beside + self.servers * self.server_tp <= self.trainer_nodes * self.gpus_per_node

    @property
    def first_server_gpu(self) -> int:
        if self.colocate:
            return 0
        return self.trainers if self.shared else self.trainer_nodes * self.gpus_per_node

    @property
    def first_teacher_gpu(self) -> int:
        last = self.first_server_gpu + self.servers * self.server_tp if self.servers else self.trainers
        return max(last, self.trainers)

    @property
    def nodes(self) -> int:
        return math.ceil((self.first_teacher_gpu + self.teachers * self.teacher_tp) / self.gpus_per_node)


def machines_of(config: Config) -> Machines:
    """Lays ranks and servers out over nodes; without GPUs, all on one node."""
    servers = config.server.n_servers if config.method == "rl" else 0
    trainers, tp = config.parallel.world_size(), config.server.tp_size
    teacher = teacher_servers(config)
    teachers, teacher_tp = (teacher.n_servers, teacher.tp_size) if teacher is not None else (0, 1)
    per_node = config.cluster.gpus_per_node or trainers + servers * tp + teachers * teacher_tp
    return Machines(per_node, trainers, servers, tp, config.server.colocate, teachers, teacher_tp)


def check_servers_fit(machines: Machines) -> None:
    """Refuses servers that would span two nodes.

    Raises:
        UserError: naming both knobs.
    """
    per_node, servers, tp = machines.gpus_per_node, machines.servers, machines.server_tp
    if servers and tp > per_node:
        raise UserError(
            f"server.tp_size={tp} exceeds cluster.gpus_per_node={per_node}: a server is on one node; lower tp_size"
        )
    if servers > 1 and not machines.shared and per_node % tp:
        raise UserError(
            f"server.tp_size={tp} does not divide cluster.gpus_per_node={per_node}, and a server lies on one node; "
            "choose a divisor"
        )
