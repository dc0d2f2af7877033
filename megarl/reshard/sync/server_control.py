"""SGLang's weight-update endpoints over HTTP, as rank 0 of the trainer calls them."""

from __future__ import annotations

import json
import time
from typing import Any

from megarl.reshard.sync.http_pipeline import HttpPipeline
from megarl.reshard.transfer.store import Deadline

KEEP_S = 2.0  # below the 5 s after which SGLang closes an idle connection


class ServerControlError(RuntimeError):
    """A server refused a request or could not be reached."""


class PendingCall:
    """A request that was sent and not yet answered."""

    def __init__(self, connection: HttpPipeline, number: int, path: str):
        self.connection = connection
        self.number = number
        self.path = path

    def answered(self, within_s: float = 0.0) -> bool:
        """True if the answer comes, or the connection ends, within `within_s` seconds."""
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
        """Gives up this answer and the answers to later requests."""
        self.connection.close()


class ServerControl:
    """The endpoints of one server. `call` sends and waits, `send` only sends.

    Requests sent before an answer has come are carried out in their order.
    """

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
        sizes: dict[str, int] = {}
        for name in ("pp_size", "dp_size", "tp_size"):
            size = info.get(name)
            if type(size) is not int or size < 1:
                raise ServerControlError(f"/server_info was answered without a whole number from 1 as {name}: {size!r}")
            sizes[name] = size
        for name in ("pp_size", "dp_size"):
            if sizes[name] != 1:
                raise ServerControlError(f"its {name} is {sizes[name]}: SGLang updates live weights only where it is 1")
        return sizes["tp_size"]
