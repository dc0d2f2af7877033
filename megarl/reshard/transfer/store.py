"""Where trainer ranks and server ranks meet: a key-value store on the trainer's address, JSON values, deadlines.

Nothing in a store is ever unpickled. Bulk values (what a rank holds) are compressed.
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
WATCH_S = 0.05  # between two looks of a `watch`


class Deadline:
    """A point in time that waits must not pass."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left. Raises TimeoutError when there are none."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"deadline of {self.seconds:g} s passed")
        return left


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A store served by this process on a free port of `host` alone; torch's own listener would take all addresses."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store that `open_store` serves, seen from another process."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def write(store: Store, key: str, value: Any) -> None:
    """Puts a JSON value into the store."""
    store.set(key, json.dumps(value))


def read(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> Any:
    """The JSON value of `key`, waited for. `watch`, where given, is called meanwhile and may raise."""
    await_key(store, key, deadline, watch)
    return json.loads(store.get(key))


def write_bulk(store: Store, key: str, value: Any) -> None:
    """Puts a large JSON value into the store."""
    store.set(key, zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1))  # type: ignore[arg-type]


def read_bulk(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> Any:
    """What `write_bulk` wrote at `key`, waited for."""
    await_key(store, key, deadline, watch)
    return json.loads(zlib.decompress(store.get(key)))


def await_key(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> None:
    """Returns when `key` is there. Raises TimeoutError after the deadline, and whatever `watch` raises."""
    while True:
        left = deadline.left()
        try:
            store.wait([key], timedelta(seconds=left if watch is None else min(left, WATCH_S)))
            return
        except DistStoreError as error:
            if watch is None:
                raise TimeoutError(f"{key} did not come within {deadline.seconds:g} s: {error}") from error
            watch()
