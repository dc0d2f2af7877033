"""The SGLang side: its weight-update endpoints, and the receiver inside a server.

`receive` runs in every tensor-parallel rank of a server, which was started with `--custom-weight-loader` naming it.
The trainer's HTTP request carries a few integers; tensors and the report on them travel over a group of their own.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import pickle
import select
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore

from megarl.reshard.geometry import Geometry, check_plain, fragments
from megarl.reshard.reference import receive_full
from megarl.reshard.transports.gloo import Deadline, GlooGroup, join_store, write
from megarl.reshard.verify import digest

log = logging.getLogger(__name__)

WEIGHT_LOADER = "megarl.reshard.sglang.receive"  # for SGLang's --custom-weight-loader
PROTOCOL = 1

# --- The endpoints ---------------------------------------------------------------------------------------------------


class ServerControlError(RuntimeError):
    """A server refused a request or could not be reached."""


class PendingCall:
    """A request that was sent and not yet answered."""

    def __init__(self, connection: http.client.HTTPConnection, path: str):
        self.connection = connection
        self.path = path

    def answered(self) -> bool:
        """Whether the answer has come, or the connection has ended."""
        sock = self.connection.sock
        return sock is None or bool(select.select([sock], [], [], 0)[0])

    def result(self, deadline: Deadline) -> dict[str, Any]:
        """The answer. Raises ServerControlError if it is a refusal, TimeoutError if it is late."""
        try:
            if self.connection.sock is not None:
                self.connection.sock.settimeout(deadline.left())
            response = self.connection.getresponse()
            body = response.read()
        except TimeoutError:
            raise TimeoutError(f"no answer to {self.path} within {deadline.seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerControlError(f"{self.path} was not answered: {type(error).__name__}: {error}") from error
        finally:
            self.connection.close()
        try:
            answer = json.loads(body) if body[:1] == b"{" else {"message": body.decode(errors="replace")}
        except ValueError as error:
            raise ServerControlError(f"{self.path} was answered with {body[:200]!r}, which is not JSON") from error
        if response.status != 200 or answer.get("success") is False:
            raise ServerControlError(f"{self.path} was refused with {response.status}: {answer}")
        return answer

    def cancel(self) -> None:
        """Gives the answer up."""
        self.connection.close()


class ServerControl:
    """The weight-update endpoints of one server. `call` sends and waits, `send` only sends."""

    def __init__(self, address: str, api_key: str):
        self.address = address
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}

    def send(self, path: str, body: dict[str, Any] | None, deadline: Deadline) -> PendingCall:
        """Sends a request: a POST with a body, a GET without."""
        connection = http.client.HTTPConnection(self.address, timeout=deadline.left())
        try:
            content = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, content, self._headers)
        except OSError as error:
            connection.close()
            raise ServerControlError(f"{path} could not be sent: {type(error).__name__}: {error}") from error
        return PendingCall(connection, path)

    def call(self, path: str, body: dict[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
        return self.send(path, body, deadline).result(deadline)

    def model_info(self, deadline: Deadline) -> dict[str, Any]:
        return self.call("/model_info", None, deadline)

    def checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        """SGLang's own checksum of each live parameter, one mapping a rank: on CPU the first 8 bytes of SHA-256."""
        return [r["checksums"] for r in self.call("/weights_checker", {"action": "checksum"}, deadline)["ranks"]]


# --- The receiver ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What the integers in the trainer's request say."""

    protocol: int
    host: int  # IPv4 address of the store
    port: int
    server: int  # index of this server in the trainer's list
    session: int  # a random number: a later trainer may be given the same port
    epoch: int  # of the group; a new one is joined anew
    join: int  # whether the trainer waits for this server to join the group
    sequence: int  # of the push within the session
    deadline_ms: int
    verify: int

    def payload(self) -> str:
        """As SGLang's `serialized_named_tensors` wants it: a pickle in base64, read there against an allow-list."""
        return b64encode(pickle.dumps([("megarl.order", torch.tensor(astuple(self), dtype=torch.int64))])).decode()

    @staticmethod
    def parse(named_tensors: Iterable[tuple[str, Tensor]]) -> Order:
        values = dict(named_tensors)["megarl.order"].tolist()
        if values[0] != PROTOCOL:
            raise ValueError(
                f"the trainer speaks weight protocol {values[0]}, this server {PROTOCOL}: update one of them"
            )
        return Order(*values)


def store_prefix(server: int, epoch: int) -> str:
    """Where in the store the trainer and one server meet."""
    return f"server/{server}/{epoch}"


class Membership:
    """This rank's place in the group with the trainer. Kept between syncs."""

    @staticmethod
    def key_of(order: Order) -> tuple[int, ...]:
        """What must stay the same for the group to be used again."""
        return order.host, order.port, order.session, order.epoch

    def __init__(self, order: Order, model: nn.Module, tp_rank: int, tp_size: int, ep_size: int):
        deadline = order.deadline_ms / 1000
        host = str(ipaddress.IPv4Address(order.host))
        self.key = self.key_of(order)
        self.rank = tp_rank
        self.store = PrefixStore(
            store_prefix(order.server, order.epoch), join_store(host, order.port, timeout_s=deadline)
        )
        self.geometry = Geometry.of(model.config, tp_rank, tp_size, ep_size)
        check_plain(model)
        write(
            self.store,
            f"layout/{tp_rank}",
            {
                "tp_size": tp_size,
                "boxes": [
                    (f.box.name, f.box.start, f.box.stop, str(f.view.dtype).removeprefix("torch."))
                    for f in fragments(model.named_parameters(), self.geometry)
                ],
            },
        )
        self.group = GlooGroup(self.store, host, rank=tp_rank + 1, size=tp_size + 1, timeout_s=deadline)

    def leave(self) -> None:
        self.group.abort()


_membership: Membership | None = None


def receive(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Receives one push and loads it. SGLang calls this in each rank; what it returns is ignored.

    A failure is reported to the trainer through the store and logged, not raised: an exception would end the
    server, while a failed push must leave it paused.
    """
    from sglang.srt.runtime_context import get_parallel

    global _membership
    order = Order.parse(named_tensors)
    deadline = Deadline(order.deadline_ms / 1000)
    rank = get_parallel().tp_rank
    host = str(ipaddress.IPv4Address(order.host))
    try:
        if _membership is not None and _membership.key != Membership.key_of(order):
            _membership.leave()
            _membership = None
        if _membership is None and not order.join:
            raise RuntimeError(
                "it is not in the trainer's group: it was restarted, or another trainer pushed to it since"
            )
        if _membership is None:
            parallel = get_parallel()
            _membership = Membership(order, model, rank, parallel.tp_size, parallel.moe_ep_size)
        receive_full(_membership.store, _membership.group, order.sequence, deadline, model.load_weights)  # type: ignore[arg-type]
        result: dict[str, Any] = {"held": held_digests(model, _membership.geometry) if order.verify else []}
    except Exception as error:
        log.exception("push %d failed in rank %d", order.sequence, rank)
        if _membership is not None:
            _membership.leave()
            _membership = None
        result = {"error": f"{type(error).__name__}: {error}"}
        try:  # over a connection of its own: the one of the group may be what broke
            store = PrefixStore(store_prefix(order.server, order.epoch), join_store(host, order.port, timeout_s=5))
            write(store, f"{order.sequence}/result/{rank}", result)
        except RuntimeError:
            log.exception("push %d: the trainer cannot be told; its deadline will end it", order.sequence)
        return
    write(_membership.store, f"{order.sequence}/result/{rank}", result)


def held_digests(model: nn.Module, geometry: Geometry) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
    """`(name, start, stop, digest)` of everything this rank holds, read back from the live parameters."""
    return [
        (f.box.name, f.box.start, f.box.stop, digest(f.view)) for f in fragments(model.named_parameters(), geometry)
    ]
