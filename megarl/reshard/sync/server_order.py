"""The order that rank 0 sends a server over HTTP: where the store is, and which attempt to join.

Everything else lies in the store or travels in the group.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

PROTOCOL = 8  # raised with every change of an order or of a value in the store
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

        Raises ValueError if it is missing, has values out of range, or the trainer speaks another protocol.
        """
        tensors = dict(named_tensors)
        if ORDER not in tensors:
            raise ValueError(f"the request holds {', '.join(map(repr, tensors)) or 'nothing'}, expected {ORDER!r}")
        values = tensors[ORDER].flatten().tolist()
        if values[:1] != [PROTOCOL]:
            raise ValueError(
                f"the trainer speaks weight protocol {values[:1]}, this server {PROTOCOL}: update one of them"
            )
        if len(values) != len(fields(ServerOrder)) or not all(isinstance(value, int) for value in values):
            raise ValueError(f"the order {values} must be {len(fields(ServerOrder))} integers")
        order = ServerOrder(*values)
        if not (0 <= order.host < 2**32 and 0 < order.port < 2**16 and min(values) >= 0):
            raise ValueError(f"the order {values} has no valid address, or a negative number")
        return order

    @property
    def address(self) -> str:
        return str(ipaddress.IPv4Address(self.host))

    @property
    def group(self) -> tuple[int, ...]:
        """Identifies the group: orders with equal values use the same one."""
        return self.host, self.port, self.session, self.epoch
