"""A gloo group of one sender and the ranks of one server, met at a TCP store on the loopback address.

The group is made here and not by `torch.distributed.init_process_group`: the members belong to different programs,
each with a default group of its own. Every wait has a deadline.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

SENDER = 0  # rank of the trainer in a group; rank r of the server is r + 1
POLL_S = 0.0005


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
    """The store that `open_store` serves, seen from a server's rank."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def write(store: Store, key: str, value: Any) -> None:
    """Puts a JSON value into the store. Nothing in a store is ever unpickled."""
    store.set(key, json.dumps(value))


def read(store: Store, key: str, deadline: Deadline, watch: Callable[[], None] | None = None) -> Any:
    """The JSON value of `key`, waited for. `watch`, where given, is called meanwhile and may raise."""
    if watch is None:
        try:
            store.wait([key], timedelta(seconds=deadline.left()))
        except DistStoreError as error:
            raise TimeoutError(f"{key} did not come within {deadline.seconds:g} s: {error}") from error
    else:
        while not store.check([key]):
            watch()
            deadline.left()
            time.sleep(POLL_S)
    return json.loads(store.get(key))


class GlooGroup:
    """One sender and the ranks of one server. `store` must be private to the group (a PrefixStore)."""

    def __init__(self, store: Store, host: str, rank: int, size: int, timeout_s: float):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        self.group = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> Work:
        """Starts a broadcast of a contiguous CPU tensor from the sender; end it with `wait`."""
        options = BroadcastOptions()
        options.rootRank = SENDER
        options.timeout = timedelta(seconds=deadline.left())
        return self.group.broadcast([tensor], options)  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Closes the connections: peers that wait on them get an error at once."""
        self.group.abort()


def wait(work: Work, deadline: Deadline, watch: Callable[[], None] | None = None) -> None:
    """Waits for a broadcast. `watch`, where given, is called meanwhile and may raise."""
    if watch is not None:
        while not work.is_completed():
            watch()
            deadline.left()
            time.sleep(POLL_S)
    work.wait(timedelta(seconds=deadline.left()))
