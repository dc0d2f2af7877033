"""Watches the servers of a run: one that dies, stops or falls silent is taken out of service and restarted.

    serving --dead, stopped, silent, failed a sync--> lost --restarted--> ready --trainer pushes--> serving
                                                       |
                                                       +--too often--> gone

A restarted server holds the weights that it was launched with. It serves again only after the trainer has pushed the
current ones. An external server is never restarted; it is ready once it answers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.observe.metrics import stats_tracker
from megarl.rollout.servers.sglang_server import ServerError

log = logging.getLogger(__name__)

SERVING, LOST, READY, ADMITTED, GONE = "serving", "lost", "ready", "admitted", "gone"
TICK_S = 0.2  # between checks of the processes, which cost microseconds
CLOSE_S = 30.0
DEATH_GRACE_S = 2.0  # a server's connections end a moment before its process does


class Watched(Protocol):
    """A server as the supervisor sees it: `SGLangServer` or `ExternalServer`."""

    owned: bool  # restarted by this run

    @property
    def address(self) -> str: ...

    @property
    def late(self) -> bool:
        """True if it was started so long ago that it must answer by now."""

    def answers(self, timeout_s: float) -> bool:
        """True if it answers to the run's key within `timeout_s`."""

    def fault(self) -> ServerError | None:
        """A fault of its processes; None if there is none, or the processes are not this run's."""

    def error(self, what: str) -> ServerError:
        """An error that names the server, and its log if there is one."""

    def restart(self) -> None:
        """Ends its remaining processes and starts it again, in this thread."""

    def stop(self) -> None:
        """Ends its processes. Called for servers of this run alone."""


@dataclass
class ServerStatus:
    """State of one server."""

    server: Watched
    state: str = SERVING
    restarts: int = 0
    error: ServerError | None = None  # the last
    lost_at: float = 0.0  # when it went out of service, of `time.monotonic`
    failed_sync: bool = False
    starts: int = 0  # by this run, after the first; `restarts` are those that its faults made necessary
    starting: bool = False  # started again, and has not answered yet
    held: bool = False  # its start was broken off, until `allow_restarts`
    put_off: ServerError | None = None  # it was silent, and was stopped for the trainer's memory
    hopeless: bool = False  # lost, and never restarted by this run
    next_check: float = 0.0


class Supervisor:
    """Watches each server in a thread of its own from `start` to `close`, and restarts it if needed.

    Servers end with the thread that started them, so call `close` when they are no longer needed. `on_change` is called
    after servers went into or out of service, from any of the threads.
    """

    def __init__(self, servers: Sequence[Watched], heartbeat_s: float, max_restarts: int) -> None:
        self.heartbeat_s = heartbeat_s
        self.max_restarts = max_restarts
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._may_restart = threading.Event()
        self._may_restart.set()
        self._restarting = threading.Lock()
        self._statuses = {server.address: ServerStatus(server) for server in servers}
        self._threads = [
            threading.Thread(target=self._watch, args=(status,), name=f"server-{address}", daemon=True)
            for address, status in self._statuses.items()
        ]

    def start(self) -> None:
        """Begins to watch. All servers must answer and hold the same weights."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops watching. Restarted servers end with their threads."""
        self._closing.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(CLOSE_S)

    # -- queries ------------------------------------------------------------------------------------------------

    def serving(self) -> list[str]:
        """Addresses of the servers that may be asked."""
        return self._in_state(SERVING)

    def alive(self) -> list[str]:
        """Addresses of the servers that run: those that serve, and restarted ones that wait for weights."""
        return self._in_state(SERVING, READY, ADMITTED)

    def starts(self, address: str) -> int:
        """Times that this run has started the server again."""
        return self._statuses[address].starts

    def outlook(self) -> str:
        """Prospect while no server serves: `ready` if one awaits weights, `starting` if one may come, else `none`."""
        with self._lock:
            states = {status.state for status in self._statuses.values() if not status.hopeless}
        return "ready" if states & {READY, ADMITTED} else "starting" if states & {LOST, SERVING} else "none"

    def died(self, address: str) -> bool:
        """True if this run's server has just died or stopped. Waits DEATH_GRACE_S for its process to end."""
        status = self._statuses[address]
        deadline = time.monotonic() + DEATH_GRACE_S
        while status.server.owned:
            # The fault first: a restart, which removes it, comes after the change of state.
            if status.server.fault() is not None or status.state not in (SERVING, ADMITTED):
                return True
            if time.monotonic() >= deadline:  # only after a look: a busy machine may come to it late
                return False
            time.sleep(TICK_S)
        return False

    def raise_cause(self, address: str = "") -> None:
        """Raises the ServerError of the server at `address`, if it is out of service: it causes other errors.

        Without an address it raises that of the server that went last, if none serves any more.
        """
        named = self._statuses.get(address)
        causes = []
        for status in [named] if named is not None else self._statuses.values():
            if status.state in (LOST, GONE):
                causes.append((status.lost_at, status.error))
            elif (fault := status.server.fault()) is not None:
                causes.append((math.inf, fault))  # its thread has not looked yet
            elif status.state == SERVING:
                return
        for _, error in sorted(causes, key=lambda cause: cause[0], reverse=True):
            if error is not None:
                raise error

    # -- while the trainer uses the servers' GPUs ----------------------------------------------------------------

    def hold_restarts(self) -> None:
        """Restarts no server until `allow_restarts`, and stops those that are starting: both need memory."""
        self._may_restart.clear()
        with self._restarting:
            with self._lock:
                lost = [s for s in self._statuses.values() if s.state == LOST and s.server.owned]
                for status in lost:
                    status.held = status.starting
                    if not status.starting:
                        status.put_off = status.server.error("did not answer, and was stopped for the trainer")
            for status in lost:
                status.server.stop()

    def allow_restarts(self) -> None:
        self._may_restart.set()

    # -- around a sync ------------------------------------------------------------------------------------------

    def before_sync(self, timeout_s: float) -> tuple[list[str], list[str]]:
        """Returns the servers to admit to the sync, which lack the current weights, and the servers to leave out.

        Waits until there is a server to sync with. Raises ServerError if there will be none, or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._in_state(SERVING, READY, ADMITTED):
            if self.outlook() == "none":
                self.raise_cause()
            if time.monotonic() > deadline:
                raise ServerError(f"no server came back within {timeout_s:g} s for a weight sync")
            time.sleep(TICK_S)
        with self._lock:
            for status in self._statuses.values():
                if status.state == READY:
                    status.state = ADMITTED
        return self._in_state(ADMITTED), self._in_state(LOST, GONE)

    def after_sync(self, healthy: Iterable[str]) -> None:
        """Takes the servers in `healthy`, proven to hold the new weights, into service. The others are restarted."""
        proven = set(healthy)
        with self._lock:
            for address, status in self._statuses.items():
                if status.state == ADMITTED and address in proven:
                    status.state = SERVING
                elif status.state in (SERVING, ADMITTED) and address not in proven:
                    status.failed_sync, status.state, status.lost_at = True, LOST, time.monotonic()
        self.on_change()

    # -- a server's thread --------------------------------------------------------------------------------------

    def _watch(self, status: ServerStatus) -> None:
        try:
            while status.state != GONE and not self._closing.wait(TICK_S):
                if status.held:
                    if self._may_restart.is_set():
                        self._restart(status)
                    continue
                fault = self._check(status)
                if fault is not None and not status.held:
                    self._lose(status, status.put_off or fault)  # it may have been stopped during the check
        except Exception as error:
            log.exception("%s can no longer be watched, and is out of service", status.server.address)
            status.error = ServerError(
                f"{status.server.address} can no longer be watched: {type(error).__name__}: {error}"
            )
            self._move(status, GONE)

    def _check(self, status: ServerStatus) -> ServerError | None:
        """The fault for which the server must be restarted; None without one. Takes a silent server out of service."""
        server = status.server
        if status.failed_sync:
            return server.error("failed in a weight sync")
        if status.put_off is not None:
            return status.put_off
        if (fault := server.fault()) is not None:
            return fault
        if status.state != LOST and time.monotonic() < status.next_check:
            return None
        answered = server.answers(self.heartbeat_s)
        status.next_check = time.monotonic() + self.heartbeat_s
        if status.state != LOST:
            if not answered:  # a second check decides
                log.warning("%s has not answered for %g s and is out of service", server.address, self.heartbeat_s)
                self._move(status, LOST)
        elif answered:
            self._welcome(status)
        elif server.late:
            return server.error(f"does not answer within server.heartbeat_s={self.heartbeat_s:g} s")
        return None

    def _lose(self, status: ServerStatus, error: ServerError) -> None:
        """Takes the server out of service and restarts it, if allowed."""
        if not status.hopeless:
            log.warning("%s", str(error).splitlines()[0])
        status.error, status.failed_sync = error, False
        self._move(status, LOST)
        if not status.server.owned:
            status.hopeless = True
        elif status.restarts >= self.max_restarts:
            self._move(status, GONE)
        else:
            while not self._may_restart.wait(TICK_S):
                if self._closing.is_set():
                    return
            status.restarts += 1
            stats_tracker.total(server_restarts=1)
            self._restart(status)

    def _restart(self, status: ServerStatus) -> None:
        try:
            with self._restarting:
                if not self._may_restart.is_set():  # held again meanwhile
                    status.held = True
                    return
                status.held, status.put_off, status.starting = False, None, True
                status.starts += 1
                status.server.restart()
        except (ServerError, OSError) as failure:
            status.error = status.server.error(f"cannot be started again: {failure}")
            self._move(status, GONE)

    def _welcome(self, status: ServerStatus) -> None:
        """Has the server wait for weights, unless it was stopped or failed in a sync while it answered."""
        with self._lock:
            if status.held or status.put_off is not None or status.failed_sync:
                return
            log.info("%s answers, and waits for the weights", status.server.address)
            status.hopeless, status.starting, status.error, status.state = False, False, None, READY
        self.on_change()

    def _in_state(self, *states: str) -> list[str]:
        with self._lock:
            return [address for address, status in self._statuses.items() if status.state in states]

    def _move(self, status: ServerStatus, state: str) -> None:
        with self._lock:
            if state in (LOST, GONE) and status.state not in (LOST, GONE):
                status.lost_at = time.monotonic()
            status.state = state
        self.on_change()
