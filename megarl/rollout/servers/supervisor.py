"""Watches the servers of a run: one that dies, stops or falls silent is taken out of service and started again.

    serving --dead, stopped, silent, failed a sync--> lost --started again--> ready --trainer pushes--> serving
                                                       |
                                                       +--too often--> gone

A server comes back into service only when the trainer has brought it the weights: until then it holds those it was
started with. A server of somebody else's is not started again; it is ready once it answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.observe.metrics import stats_tracker
from megarl.rollout.servers.sglang_server import ServerError

log = logging.getLogger(__name__)

SERVING, LOST, READY, ADMITTED, GONE = "serving", "lost", "ready", "admitted", "gone"
TICK_S = 0.2  # between looks at the processes, which cost microseconds
CLOSE_S = 30.0
TELL_S = 2.0  # a server's connections end a moment before its process can be seen to have ended


class Watched(Protocol):
    """A server as the supervisor sees it: `SGLangServer` or `ExternalServer`."""

    owned: bool  # whether it is ours to start again

    @property
    def address(self) -> str: ...

    @property
    def late(self) -> bool:
        """Whether it was started so long ago that it must answer by now."""

    def answers(self, timeout_s: float) -> bool:
        """Whether it answers to our key within `timeout_s`."""

    def fault(self) -> ServerError | None:
        """What is wrong with its processes, None where nothing is or they are not ours."""

    def error(self, what: str) -> ServerError:
        """An error that names the server, and its log where there is one."""

    def restart(self) -> None:
        """Ends what is left of it and starts it again, in this thread."""


@dataclass
class Standing:
    """How one server stands."""

    server: Watched
    state: str = SERVING
    restarts: int = 0
    error: ServerError | None = None  # the last
    failed_sync: bool = False
    hopeless: bool = False  # lost, and not ours to start again
    next_look: float = 0.0


class Supervisor:
    """A thread for each server looks after it from `start` to `close`, and starts it again where need be.

    Servers end with the thread that started them, so `close` comes when they are no longer needed. `on_change` is
    called, from any of the threads, after servers went into or out of service.
    """

    def __init__(self, servers: Sequence[Watched], heartbeat_s: float, max_restarts: int) -> None:
        self.heartbeat_s = heartbeat_s
        self.max_restarts = max_restarts
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._standings = {server.address: Standing(server) for server in servers}
        self._threads = [
            threading.Thread(target=self._watch, args=(standing,), name=f"server-{address}", daemon=True)
            for address, standing in self._standings.items()
        ]

    def start(self) -> None:
        """All servers answer and serve the same weights: from now on they are watched."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops watching. Servers that were started again end with their threads."""
        self._closing.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_S)

    # -- what others ask ----------------------------------------------------------------------------------------

    def serving(self) -> list[str]:
        """Addresses of the servers that may be asked."""
        return self._in_state(SERVING)

    def outlook(self) -> str:
        """Where none serves: `ready` if one waits for weights, `starting` if one may come yet, else `none`."""
        with self._lock:
            states = {standing.state for standing in self._standings.values() if not standing.hopeless}
        return "ready" if states & {READY, ADMITTED} else "starting" if states & {LOST, SERVING} else "none"

    def died(self, address: str) -> bool:
        """Whether the server, one of ours, has just died or stopped and is started again, or was given up."""
        standing = self._standings[address]
        deadline = time.monotonic() + TELL_S
        while standing.server.owned and time.monotonic() < deadline:
            if standing.state not in (SERVING, ADMITTED) or standing.server.fault() is not None:
                return True
            time.sleep(TICK_S)
        return False

    def blame(self) -> None:
        """Raises the ServerError of a server that is not in service, if there is one: it is the cause of others."""
        for standing in self._standings.values():
            error = standing.server.fault() or (standing.error if standing.state in (LOST, GONE) else None)
            if error is not None:
                raise error

    # -- around a sync ------------------------------------------------------------------------------------------

    def before_sync(self, timeout_s: float) -> tuple[list[str], list[str]]:
        """Servers to admit to the sync, as they do not hold the weights yet, and servers to leave out of it.

        Waits until there is one to sync with. Raises ServerError if there will be none, or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._in_state(SERVING, READY, ADMITTED):
            if self.outlook() == "none":
                self.blame()
            if time.monotonic() > deadline:
                raise ServerError(f"no server came back within {timeout_s:g} s for a weight sync")
            time.sleep(TICK_S)
        with self._lock:
            for standing in self._standings.values():
                if standing.state == READY:
                    standing.state = ADMITTED
        return self._in_state(ADMITTED), self._in_state(LOST, GONE)

    def after_sync(self, healthy: Iterable[str]) -> None:
        """`healthy` hold the new weights, proven. The others that took part are started again."""
        proven = set(healthy)
        with self._lock:
            for address, standing in self._standings.items():
                if standing.state == ADMITTED and address in proven:
                    standing.state = SERVING
                elif standing.state in (SERVING, ADMITTED) and address not in proven:
                    standing.failed_sync, standing.state = True, LOST
        self.on_change()

    # -- a server's thread --------------------------------------------------------------------------------------

    def _watch(self, standing: Standing) -> None:
        while standing.state != GONE and not self._closing.wait(TICK_S):
            fault = self._look(standing)
            if fault is not None:
                self._lose(standing, fault)

    def _look(self, standing: Standing) -> ServerError | None:
        """Why the server must be replaced, None where it need not. Takes it out of service while it is silent."""
        server = standing.server
        if standing.failed_sync:
            return server.error("failed in a weight sync")
        if (fault := server.fault()) is not None:
            return fault
        if standing.state != LOST and time.monotonic() < standing.next_look:
            return None
        answered = server.answers(self.heartbeat_s)
        standing.next_look = time.monotonic() + self.heartbeat_s
        if standing.state != LOST:
            if not answered:  # a second look decides
                log.warning("%s has not answered for %g s and is out of service", server.address, self.heartbeat_s)
                self._move(standing, LOST)
        elif answered:
            log.info("%s answers, and waits for the weights", server.address)
            standing.hopeless = False
            self._move(standing, READY)
        elif server.late:
            return server.error(f"does not answer within server.heartbeat_s={self.heartbeat_s:g} s")
        return None

    def _lose(self, standing: Standing, error: ServerError) -> None:
        """Takes the server out of service and starts it again, if that may be."""
        if not standing.hopeless:
            log.warning("%s", str(error).splitlines()[0])
        standing.error, standing.failed_sync = error, False
        self._move(standing, LOST)
        if not standing.server.owned:
            standing.hopeless = True
        elif standing.restarts >= self.max_restarts:
            self._move(standing, GONE)
        else:
            standing.restarts += 1
            stats_tracker.total(server_restarts=1)
            try:
                standing.server.restart()
            except (ServerError, OSError) as failure:
                standing.error = standing.server.error(f"cannot be started again: {failure}")
                self._move(standing, GONE)

    def _in_state(self, *states: str) -> list[str]:
        with self._lock:
            return [address for address, standing in self._standings.items() if standing.state in states]

    def _move(self, standing: Standing, state: str) -> None:
        with self._lock:
            standing.state = state
        self.on_change()
