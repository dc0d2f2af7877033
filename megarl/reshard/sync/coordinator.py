"""Rank 0's side of a sync: the servers and their states, the phases over HTTP, and the cause of a failure.

A server that fails is dirty. It stays paused, so that it serves no mix of versions, and takes part in no rollout until
a sync has brought it all weights. `reshard.on_failure` says whether the others go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

from megarl.observe.timeline import timeline
from megarl.reshard.config import ReshardConfig
from megarl.reshard.sync.server_control import PendingCall, ServerControlError
from megarl.reshard.sync.server_link import EXPLAIN_S, NoAnswer, RankFailure, ServerLink
from megarl.reshard.transfer.store import Deadline

log = logging.getLogger(__name__)

PROBE_S = 5.0  # time for a dirty server to answer before a sync goes on without it
FAILURES = (RuntimeError, OSError, ValueError)  # TimeoutError, HTTP and store errors are subclasses


class WeightSyncError(RuntimeError):
    """A sync failed. Servers that took part stay paused until a sync succeeds, or until they are restarted.

    `server` is the address at fault, "" where no server is: another try would fail again. `rank` is its rank or the
    trainer's, `tensor` the first checkpoint tensor, each "" where unknown. `phase` is the phase of the sync.
    """

    def __init__(self, message: str, *, server: str = "", rank: str = "", phase: str = "", tensor: str = ""):
        super().__init__(message)
        self.server = server
        self.rank = rank
        self.phase = phase
        self.tensor = tensor


class Retry(Exception):
    """The attempt failed at servers that were dropped: another one, without them, may succeed."""


class Coordinator:
    """The servers of a session, as rank 0 sees them. `active` are the servers of the attempt under way."""

    def __init__(self, config: ReshardConfig, addresses: Sequence[str], api_key: str):
        self.config = config
        self.api_key = api_key
        self.links: list[ServerLink] = []
        self.active: list[ServerLink] = []
        self.seconds: dict[str, float] = {}
        self.death_probe: Callable[[str], bool] = lambda address: False  # True: it has died and will be restarted
        self._phase = ("", 0.0)
        self._paused_at = 0.0  # Unix seconds
        self._links_made = 0  # an index is never used twice
        for address in addresses:
            self.admit(address)

    # --- servers ---

    def admit(self, address: str) -> None:
        """Adds the server at `address`, dirty: the next sync brings it everything."""
        known = [link for link in self.links if link.address == address]
        for link in known:
            link.leave()
            self.links.remove(link)
        self.links.append(ServerLink(self._links_made, address, self.api_key))
        self._links_made += 1
        self.links[-1].dirty = True

    def remove(self, address: str) -> None:
        """Forgets a server that will not come back."""
        for link in [link for link in self.links if link.address == address]:
            link.leave()
            self.links.remove(link)

    def served_version(self) -> int:
        """The highest version that a server serves."""
        self.active = list(self.links)
        with self.timed("check"):
            labels = [str(info.get("weight_version")) for _, info in self.call_all("/model_info", None)]
        return max((int(label) for label in labels if label.isdigit()), default=0)

    # --- phases ---

    def begin(self, version: int, order: Callable[[ServerLink], None], *, again: bool) -> None:
        """Pauses all servers and sends each its `order`, without waiting in between: a server pauses first.

        With `again` some servers may serve `version` already.
        """
        self.seconds = {}
        self.active = list(self.links)
        with self.timed("check"):
            self._check(version if again else version - 1)
        pauses: dict[ServerLink, PendingCall] = {}
        self._paused_at = time.time()
        with self.timed("pause"):
            deadline = Deadline(self.config.control_deadline_s)

            def send(link: ServerLink) -> None:
                pauses[link] = link.control.send("/pause_generation", {"mode": self.config.pause_mode}, deadline)
                order(link)

            self.for_each(send)
            self.for_each(lambda link: pauses[link].result(deadline))
        with self.timed("begin"):
            deadline = Deadline(self.config.control_deadline_s)
            self.for_each(lambda link: link.await_begin(deadline))

    def commit(self, version: int) -> None:
        """Puts the servers back to work at `version`. Their weights are proven: one that fails here is left behind."""
        with self.timed("version"):
            label = {"new_version": str(version), "abort_all_requests": False}
            self.call_all("/update_weight_version", label)
        with self.timed("continue"):
            self.call_all("/continue_generation", {})
        now = time.time()
        for link in self.active:
            link.dirty = False
            link.version_checked = True
            timeline.add(f"paused for version {version}", self._paused_at, now, link.address)

    def _check(self, highest: int) -> None:
        """Leaves out dirty servers that do not answer, where the policy allows; refuses versions above `highest`."""
        if self.config.on_failure == "drop_server":
            self.active = [link for link in self.active if not link.dirty or self._answers(link)]
            if not self.active:
                failure = self.sync_error(None, ServerControlError("no server is left that answers"))
                failure.server = ", ".join(link.address for link in self.links)
                raise failure
        unchecked = [link for link in self.active if not link.version_checked]

        def check(link: ServerLink) -> None:
            deadline = Deadline(self.config.control_deadline_s)
            link.tp_size = link.control.tp_size(deadline)
            served = str(link.control.model_info(deadline).get("weight_version"))
            if served.isdigit() and int(served) > highest:
                raise ValueError(f"it serves version {served} already: versions only grow")

        self.for_each(check, unchecked)

    def _answers(self, link: ServerLink) -> bool:
        try:
            link.control.model_info(Deadline(PROBE_S))
        except (ServerControlError, OSError) as error:
            log.warning("server %s is left out of the sync: %s", link.address, error)
            return False
        return True

    def end(self) -> None:
        """Waits until every server has ended its update session."""
        with self.timed("end"):
            deadline = Deadline(self.config.control_deadline_s)
            self.for_each(lambda link: link.await_end(deadline))

    def call_all(self, path: str, body: dict[str, Any] | None) -> list[tuple[ServerLink, dict[str, Any]]]:
        """Sends one request to every active server at once. Returns the answers of the servers that did not fail."""
        deadline = Deadline(self.config.control_deadline_s)
        calls: dict[ServerLink, PendingCall] = {}
        answers: list[tuple[ServerLink, dict[str, Any]]] = []
        self.for_each(lambda link: calls.update({link: link.control.send(path, body, deadline)}))
        self.for_each(lambda link: answers.append((link, calls[link].result(deadline))))
        return answers

    def for_each(self, action: Callable[[ServerLink], object], links: Sequence[ServerLink] | None = None) -> None:
        """Calls `action` with every active server, or every one of `links`; drops a server where it fails."""
        for link in list(self.active if links is None else links):
            try:
                action(link)
            except FAILURES as error:
                self.drop(link, error)

    @contextmanager
    def timed(self, phase: str, deadline_s: float | None = None) -> Iterator[None]:
        """Adds the seconds inside to `phase`, and names the phase in errors."""
        self._phase = (phase, deadline_s or self.config.control_deadline_s)
        start = time.perf_counter()
        with timeline.span(f"sync/{phase}"):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    # --- failures ---

    def drop(self, link: ServerLink, error: Exception, rank: str = "", tensor: str = "", words: str = "") -> None:
        """Marks a server dirty and leaves it out of the attempt.

        Raises WeightSyncError if no server is left, or if the policy is to stop and the server is alive: a server that
        died said nothing about the weights.
        """
        failure = self.sync_error(link, error, rank, tensor, words)
        link.dirty = True
        link.leave()
        if link in self.active:
            self.active.remove(link)
        if not self.active or (self.config.on_failure == "stop" and not self.death_probe(link.address)):
            raise failure from error
        log.error("%s; going on without %s", failure, link.address)

    def sync_error(
        self, link: ServerLink | None, error: Exception, rank: str = "", tensor: str = "", words: str = ""
    ) -> WeightSyncError:
        """The error that users see, with the server, phase, rank and tensor of `error`. `words` replace its text."""
        if isinstance(error, WeightSyncError):
            return error
        phase, deadline_s = self._phase
        where = link.address if link is not None else str(getattr(error, "server", ""))
        tensor = tensor or str(getattr(error, "tensor", ""))
        if isinstance(error, RankFailure):
            rank = rank or str(error.rank)
        at = f"at {where} " if where else ""
        return WeightSyncError(
            f"weight sync failed {at}in phase {phase} (deadline {deadline_s:g} s): {words or error}; "
            "the servers that took part stay paused until a sync succeeds",
            server=where,
            rank=rank,
            phase=phase,
            tensor=tensor,
        )

    def give_up(self, error: Exception) -> dict[str, Any]:
        """Ends an attempt that failed: every server that took part is dirty and joins anew.

        Returns the verdict for the other trainer ranks.
        """
        for link in self.active:
            link.dirty = True
            link.leave()
        if isinstance(error, Retry):
            return {"retry": True}
        failure = self.sync_error(None, error)
        places = {name: getattr(failure, name) for name in ("server", "rank", "phase", "tensor")}
        return {"message": str(failure), **places}

    def attribute_failure(self, outcomes: Sequence[dict[str, Any] | None], relays_join: bool = False) -> None:
        """Finds the servers that broke a transfer, drops them, and raises `Retry`; or WeightSyncError, by the policy.

        With `relays_join`, servers were about to connect to each other. If nothing else failed and no server died,
        their network is at fault. Then no server is dropped, and the next attempt has no relays.

        `outcomes` are the trainer ranks' own reports, None where one is missing. A rank that lost a connection or
        waited in vain is rarely at fault. The first of these that exists is:

        1. a server whose HTTP call failed: it died
        2. a silent server; if one of them has died, only that one, as the others may be slow and are asked again
        3. a trainer rank without a report
        4. a server rank, then a trainer rank, that failed without waiting for a peer
        5. a server that a trainer rank or another server waited for, and that waited for no other server itself
        """
        deadline = Deadline(EXPLAIN_S)
        server_errors = {link: error for link in self.active if (error := link.order_error(deadline)) is not None}
        at_fault = [link for link, error in server_errors.items() if not isinstance(error, (RankFailure, NoAnswer))]
        silent = [link for link, error in server_errors.items() if isinstance(error, NoAnswer)]
        dead = [] if at_fault else [link for link in silent if self.death_probe(link.address)]
        if relays_join and not at_fault and not dead and _only_waited(server_errors.values()):
            raise Retry
        at_fault = at_fault or dead or silent
        lost = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        rank_errors = [outcome for outcome in outcomes if outcome is not None and "error" in outcome]
        if not at_fault and lost:
            reports = "".join(f"; {link.address}: {error}" for link, error in server_errors.items())
            who = f"trainer rank {lost[0]} did not report that it has sent its part{reports}"
            raise self.sync_error(None, RuntimeError(who), rank=f"trainer rank {lost[0]}")
        at_fault = at_fault or [link for link, error in server_errors.items() if not getattr(error, "peer", "")]
        if not at_fault and (without_peer := [outcome for outcome in rank_errors if not outcome.get("peer")]):
            cause = without_peer[0]
            raise self.sync_error(None, RuntimeError(cause["error"]), tensor=cause.get("tensor", ""))
        waits = {
            link: {"error": str(error), "peer": error.peer, "tensor": error.tensor}
            for link, error in server_errors.items()
            if _waited_for_server(error)
        }
        blames = [*rank_errors, *waits.values()]
        named = [link for link in self.active if any(_names(blame, link) for blame in blames)]
        at_fault = at_fault or [link for link in named if link not in waits] or named
        for link in at_fault or list(server_errors):
            outcome: dict[str, Any] = next((blame for blame in blames if _names(blame, link)), {})
            words = "; ".join(str(part) for part in (server_errors.get(link), outcome.get("error")) if part)
            rank = str(outcome.get("peer", "")).partition(" of ")[0]
            self.drop(link, server_errors.get(link) or RuntimeError(words), rank, outcome.get("tensor", ""), words)
        raise Retry


def _waited_for_server(error: Exception) -> TypeGuard[RankFailure]:
    return isinstance(error, RankFailure) and " of server " in error.peer


def _only_waited(errors: Collection[Exception]) -> bool:
    """True if servers waited for other servers in vain, and no other failure is known."""
    waited = [error for error in errors if _waited_for_server(error)]
    return bool(waited) and all(error in waited or isinstance(error, NoAnswer) for error in errors)


def _names(outcome: dict[str, Any], link: ServerLink) -> bool:
    """True if a trainer rank's report names a rank of this server."""
    return bool(outcome.get("peer", "").endswith(f" of server {link.index}"))
