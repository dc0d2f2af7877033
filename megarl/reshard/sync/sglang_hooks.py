"""The SGLang side: its weight-update endpoints, and the receiver inside a server.

`receive` runs in every tensor-parallel rank of a server, which was started with `--custom-weight-loader` naming it.
The trainer's HTTP request carries a few integers; tensors and the report on them travel over a group of their own.
"""

from __future__ import annotations

import functools
import json
import pickle
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from megarl.reshard.plan.holdings import Fragment
from megarl.reshard.plan.sglang_layout import Geometry, check_plain, fragments
from megarl.reshard.sync import server_rank as receiver
from megarl.reshard.sync.http_pipeline import HttpPipeline
from megarl.reshard.transfer.store import Deadline

WEIGHT_LOADER = "megarl.reshard.sync.sglang_hooks.receive"  # for SGLang's --custom-weight-loader

KEEP_S = 2.0  # below the 5 s after which SGLang closes an idle connection

# --- The endpoints ---------------------------------------------------------------------------------------------------


class ServerControlError(RuntimeError):
    """A server refused a request or could not be reached."""


class PendingCall:
    """A request that was sent and not yet answered."""

    def __init__(self, connection: HttpPipeline, number: int, path: str):
        self.connection = connection
        self.number = number
        self.path = path

    def answered(self, within_s: float = 0.0) -> bool:
        """Whether the answer comes, or the connection ends, within so many seconds."""
        return self.connection.answered(self.number, within_s)

    def result(self, deadline: Deadline) -> dict[str, Any]:
        """The answer. Raises ServerControlError if it is a refusal, TimeoutError if it is late."""
        if not self.answered(max(deadline.end - time.monotonic(), 0.0)):
            self.cancel()
            raise TimeoutError(f"no answer to {self.path} within {deadline.seconds:g} s")
        try:
            status, body = self.connection.answer(self.number)
        except ConnectionError as error:
            raise ServerControlError(f"{self.path} was not answered: {error}") from error
        try:
            answer = json.loads(body) if body[:1] == b"{" else {"message": body.decode(errors="replace")}
        except ValueError as error:
            raise ServerControlError(f"{self.path} was answered with {body[:200]!r}, which is not JSON") from error
        if status != 200 or answer.get("success") is False:
            raise ServerControlError(f"{self.path} was refused with {status}: {answer}")
        return answer

    def cancel(self) -> None:
        """Gives the answer up, and those to later requests."""
        self.connection.close()


class ServerControl:
    """The weight-update endpoints of one server. `call` sends and waits, `send` only sends: what is sent before an
    answer has come is done in its turn."""

    def __init__(self, address: str, api_key: str):
        self.address = address
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        self._connection: HttpPipeline | None = None

    def send(self, path: str, body: dict[str, Any] | None, deadline: Deadline) -> PendingCall:
        """Sends a request: a POST with a body, a GET without."""
        content = b"" if body is None else json.dumps(body).encode()
        try:
            if self._connection is None or self._connection.idle_s() > KEEP_S:
                if self._connection is not None:
                    self._connection.close()
                self._connection = HttpPipeline(self.address, deadline.left())
            method = "GET" if body is None else "POST"
            number = self._connection.ask(method, path, self._headers, content, deadline.left())
        except OSError as error:
            if self._connection is not None:
                self._connection.close()
            raise ServerControlError(f"{path} could not be sent: {type(error).__name__}: {error}") from error
        return PendingCall(self._connection, number, path)

    def call(self, path: str, body: dict[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
        return self.send(path, body, deadline).result(deadline)

    def model_info(self, deadline: Deadline) -> dict[str, Any]:
        return self.call("/model_info", None, deadline)

    def tp_size(self, deadline: Deadline) -> int:
        """Tensor-parallel ranks of the server. Raises ServerControlError for layouts that cannot be updated live."""
        info = self.call("/server_info", None, deadline)
        for name in ("pp_size", "dp_size"):
            if info[name] != 1:
                raise ServerControlError(f"its {name} is {info[name]}: SGLang updates live weights only where it is 1")
        return int(info["tp_size"])

    def checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        """SGLang's own checksum of each live parameter, one mapping a rank: on CPU the first 8 bytes of SHA-256."""
        return [r["checksums"] for r in self.call("/weights_checker", {"action": "checksum"}, deadline)["ranks"]]


# --- The loader ------------------------------------------------------------------------------------------------------


def order_body(order: receiver.Order, tp_size: int, flush: bool) -> dict[str, Any]:
    """The body of the request that makes every rank of a server call `receive` with an order, and then drop its caches
    if `flush`.

    SGLang wants a pickle in base64 for each rank, and reads it there against an allow-list.
    """
    payload = b64encode(pickle.dumps([(receiver.ORDER, order.tensor())])).decode()
    return {"serialized_named_tensors": [payload] * tp_size, "load_format": WEIGHT_LOADER, "flush_cache": flush}


@functools.cache
def rest_while_paused() -> None:
    """Has this process's scheduler sleep while it is paused, where it sleeps when it is idle (`sleep_on_idle`).

    SGLang's own asks without a break whether something has come. Two paused servers then take both cores of a machine
    that has no more, and a sync waits for its turn at every step.
    """
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    @functools.wraps(record)
    def record_and_rest(scheduler: Scheduler) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_rest


def receive(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Carries out the trainer's order in one rank. SGLang calls this; what it returns is ignored."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rest_while_paused()

    def live() -> Sequence[Fragment]:
        check_plain(model)
        geometry = Geometry.of(model.config, parallel.tp_rank, parallel.tp_size, parallel.moe_ep_size)
        return list(fragments(model.named_parameters(), geometry))

    order = receiver.Order.parse(named_tensors)
    receiver.receive(order, live, parallel.tp_rank, parallel.tp_size, model.load_weights)  # type: ignore[arg-type]
