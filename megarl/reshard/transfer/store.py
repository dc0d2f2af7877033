"""The key-value store in which trainer ranks and server ranks meet: JSON values, deadlines, the trainer's address.

Nothing in a store is ever unpickled. Bulk values (a rank's holdings) are compressed.
"""

from __future__ import annotations

import json
import socket
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store, TCPStore

POLL_S = 0.002
WATCH_S = 0.05  # between two calls of `watch`


class Deadline:
    """A point in time that waits must not pass."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left. Raises TimeoutError when there are none."""
        seconds_left = self.end - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError(f"deadline of {self.seconds:g} s passed")
        return seconds_left


class AttemptDeadline(Deadline):
    """A deadline of waits that also end once `ended` stands in the store: nobody answers them any more.

    `store` is a connection of its own: a wait of another thread would block it.
    """

    def __init__(self, seconds: float, store: Store, ended: str):
        super().__init__(seconds)
        self._store = store
        self._ended = ended
        self._next_look = time.monotonic()

    def left(self) -> float:
        """Seconds left. Raises TimeoutError when there are none, RuntimeError if the attempt has ended."""
        if time.monotonic() >= self._next_look:
            if self._store.check([self._ended]):
                raise RuntimeError("the trainer has ended the attempt")
            self._next_look = time.monotonic() + WATCH_S
        return super().left()


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Serves a store from this process, on a free port of `host` alone; torch's own listener takes all addresses."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connects another process to the store that `open_store` serves."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def write(store: Store, key: str, value: Any) -> None:
    """Puts a JSON value into the store."""
    store.set(key, json.dumps(value))


def read(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> Any:
    """Waits for the JSON value of `key`. `watch` is called meanwhile and may raise."""
    await_key(store, key, deadline, watch)
    return json.loads(store.get(key))


def write_bulk(store: Store, key: str, value: Any) -> None:
    """Puts a large JSON value into the store, compressed."""
    store.set(key, zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1))  # type: ignore[arg-type]


def read_bulk(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> Any:
    """Waits for a value written by `write_bulk`."""
    await_key(store, key, deadline, watch)
    return json.loads(zlib.decompress(store.get(key)))


def await_key(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> None:
    """Returns once `key` exists. Raises TimeoutError after the deadline, and any error of `watch`."""
    if watch is None:
        try:
            store.wait([key], timedelta(seconds=deadline.left()))
        except DistStoreError as error:
            raise TimeoutError(f"{key} did not come within {deadline.seconds:g} s: {error}") from error
        return
    next_watch = time.monotonic() + WATCH_S
    while not store.check([key]):  # a `wait` that times out prints two warnings
        deadline.left()
        if time.monotonic() >= next_watch:
            watch()
            next_watch = time.monotonic() + WATCH_S
        time.sleep(POLL_S)
