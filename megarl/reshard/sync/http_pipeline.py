"""One HTTP/1.1 connection with pipelining: requests follow each other without waiting for the answers in between.

A server carries such requests out in order, and begins none before it has answered the one before. `http.client` waits
for every answer, and each request then costs a round trip.
"""

from __future__ import annotations

import select
import socket
import time


class HttpPipeline:
    """A connection to `host:port`. Requests are numbered from 0; `timeout_s` is for connecting and for each send."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable = select.poll()  # select() takes no descriptor beyond 1023
        self._readable.register(self._socket, select.POLLIN)
        self._received = b""
        self._answers: list[tuple[int, bytes]] = []  # status and body, in the order of the requests
        self._asked = 0
        self._used = time.monotonic()
        self.ended = ""  # the reason why no more answers come; "" while the connection is open

    def ask(self, method: str, path: str, headers: dict[str, str], content: bytes, timeout_s: float) -> int:
        """Sends a request. Returns its number. Raises OSError if the connection is lost."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._address}", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.settimeout(timeout_s)
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        self._asked += 1
        self._used = time.monotonic()
        return self._asked - 1

    def answered(self, number: int, within_s: float) -> bool:
        """True if the answer to a request comes, or the connection ends, within `within_s` seconds."""
        end = time.monotonic() + within_s
        while len(self._answers) <= number and not self.ended:
            if not self._readable.poll(max(end - time.monotonic(), 0.0) * 1000):
                return False
            self._receive()
        return True

    def answer(self, number: int) -> tuple[int, bytes]:
        """Status and body. Raises ConnectionError if the connection ended before the answer."""
        if len(self._answers) <= number:
            raise ConnectionError(self.ended)
        return self._answers[number]

    def idle_s(self) -> float:
        """Seconds since the last request: 0 while one is unanswered, infinite once the connection has ended."""
        if self._asked and not self.answered(self._asked - 1, 0.0):
            return 0.0
        if self.ended:
            return float("inf")
        return time.monotonic() - self._used

    def close(self) -> None:
        self.ended = self.ended or "it was given up"
        self._socket.close()

    def _receive(self) -> None:
        """Reads once from the socket and parses the answers that are complete."""
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            self.ended = f"{type(error).__name__}: {error}"
            return
        self._received += data
        while answer := _parse(self._received, ended=not data):
            status, body, self._received = answer
            self._answers.append((status, body))
        if not data:
            self.ended = "the server closed the connection"


def _parse(data: bytes, ended: bool) -> tuple[int, bytes, bytes] | None:
    """Status and body of the first answer in `data`, and the rest of `data`; None if it is incomplete."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(fields["content-length"]) if "content-length" in fields else len(rest) if ended else len(rest) + 1
    if len(rest) < length:
        return None
    return int(first.split(" ")[1]), rest[:length], rest[length:]
