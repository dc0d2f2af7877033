"""The order that rank 0 sends a server over HTTP: where the store is, and which attempt to join.

Everything else lies in the store or travels in the group.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

PROTOCOL = 4  # raised with every change of an order or of a value in the store
ORDER = "megarl.order"  # name of the tensor that carries it


@dataclass(frozen=True)
class ServerOrder:
    """Nine integers, sent as one int64 tensor."""

    protocol: int
    host: int  # IPv4 address of the store
    port: int
    server: int  # index of this server in the trainer's list
    session: int  # a random number: a later trainer may be given the same port
    epoch: int  # of the group; a new one is joined anew
    join: int  # 1 if the trainer waits for this server to join the group
    attempt_number: int  # within the session
    deadline_ms: int

    @staticmethod
    def of(host: str, **values: int) -> ServerOrder:
        return ServerOrder(protocol=PROTOCOL, host=int(ipaddress.IPv4Address(host)), **values)

    def tensor(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.int64)

    @staticmethod
    def parse(named_tensors: Iterable[tuple[str, Tensor]]) -> ServerOrder:
        """Reads the order from the tensors that SGLang hands to its weight loader.

        Raises ValueError if the trainer speaks another protocol.
        """
        values = dict(named_tensors)[ORDER].tolist()
        if values[0] != PROTOCOL:
            raise ValueError(
                f"the trainer speaks weight protocol {values[0]}, this server {PROTOCOL}: update one of them"
            )
        return ServerOrder(*values)

    @property
    def address(self) -> str:
        return str(ipaddress.IPv4Address(self.host))

    @property
    def group(self) -> tuple[int, ...]:
        """Identifies the group: orders with equal values use the same one."""
        return self.host, self.port, self.session, self.epoch
