"""Rank 0's side of a sync: the servers and their states, the phases over HTTP, and who is to blame when one fails.

A server that fails is dirty: it stays paused, so that it serves no mix of versions, and takes part in no rollout until
a sync has brought it all weights. `reshard.on_failure` says whether the others go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.reshard.config import ReshardConfig
from megarl.reshard.sync.server_link import EXPLAIN_S, NoAnswer, RankFailure, ServerLink
from megarl.reshard.sync.sglang_hooks import PendingCall, ServerControlError
from megarl.reshard.transfer.store import Deadline

log = logging.getLogger(__name__)

PROBE_S = 5.0  # how long a dirty server may take to answer before a sync goes on without it
FAILURES = (RuntimeError, OSError, ValueError)  # of which TimeoutError, http and store errors are kinds


class WeightSyncError(RuntimeError):
    """A sync failed. Servers that took part stay paused until a sync succeeds, or until they are restarted.

    `server` is the address at fault, "" where no server is: trying again then fails again. `rank` is its rank or the
    trainer's, `tensor` the first checkpoint tensor, each "" where unknown; `phase` is where the sync stood.
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
    """The servers of a session, as rank 0 sees them. `active` are those of the attempt under way."""

    def __init__(self, config: ReshardConfig, addresses: Sequence[str], api_key: str):
        self.config = config
        self.api_key = api_key
        self.links: list[ServerLink] = []
        self.active: list[ServerLink] = []
        self.seconds: dict[str, float] = {}
        self.died: Callable[[str], bool] = lambda address: False  # whether the server has, and others look after it
        self._phase = ("", 0.0)
        self._made = 0  # links so far: an index is never used twice
        for address in addresses:
            self.admit(address)

    # --- servers ---

    def admit(self, address: str) -> None:
        """Counts the server at `address` in, from now on dirty: the next sync brings it everything."""
        known = [link for link in self.links if link.address == address]
        for link in known:
            link.leave()
            self.links.remove(link)
        self.links.append(ServerLink(self._made, address, self.api_key))
        self._made += 1
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
        """Pauses the servers and sends each its `order`, at once: a server pauses first. `again` where some serve
        `version` already."""
        self.seconds = {}
        self.active = list(self.links)
        with self.timed("check"):
            self._check(version if again else version - 1)
        paused: dict[ServerLink, PendingCall] = {}
        with self.timed("pause"):
            deadline = Deadline(self.config.control_deadline_s)

            def send(link: ServerLink) -> None:
                paused[link] = link.control.send("/pause_generation", {"mode": self.config.pause_mode}, deadline)
                order(link)

            self.each(send)
            self.each(lambda link: paused[link].result(deadline))
        with self.timed("begin"):
            deadline = Deadline(self.config.control_deadline_s)
            self.each(lambda link: link.begun(deadline))

    def commit(self, version: int) -> None:
        """Puts the servers back to work at `version`. What they hold is proven: one that fails here is left behind."""
        with self.timed("version"):
            label = {"new_version": str(version), "abort_all_requests": False}
            self.call_all("/update_weight_version", label)
        with self.timed("continue"):
            self.call_all("/continue_generation", {})
        for link in self.active:
            link.dirty = False
            link.checked = True

    def _check(self, highest: int) -> None:
        """Leaves out dirty servers that do not answer, where the policy allows; refuses versions that do not grow."""
        if self.config.on_failure == "drop_server":
            self.active = [link for link in self.active if not link.dirty or self._answers(link)]
            if not self.active:
                failure = self.failure(None, ServerControlError("no server is left that answers"))
                failure.server = ", ".join(link.address for link in self.links)
                raise failure
        new = [link for link in self.active if not link.checked]

        def check(link: ServerLink) -> None:
            deadline = Deadline(self.config.control_deadline_s)
            link.tp_size = link.control.tp_size(deadline)
            served = str(link.control.model_info(deadline).get("weight_version"))
            if served.isdigit() and int(served) > highest:
                raise ValueError(f"it serves version {served} already: versions only grow")

        self.each(check, new)

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
            self.each(lambda link: link.ended(deadline))

    def call_all(self, path: str, body: dict[str, Any] | None) -> list[tuple[ServerLink, dict[str, Any]]]:
        """One request to every active server at once. Returns the answers of those that did not fail."""
        deadline = Deadline(self.config.control_deadline_s)
        calls: dict[ServerLink, PendingCall] = {}
        answers: list[tuple[ServerLink, dict[str, Any]]] = []
        self.each(lambda link: calls.update({link: link.control.send(path, body, deadline)}))
        self.each(lambda link: answers.append((link, calls[link].result(deadline))))
        return answers

    def each(self, action: Callable[[ServerLink], object], links: Sequence[ServerLink] | None = None) -> None:
        """Does `action` with every active server; the policy decides about one where it fails."""
        for link in list(self.active if links is None else links):
            try:
                action(link)
            except FAILURES as error:
                self.drop(link, error)

    @contextmanager
    def timed(self, phase: str, deadline_s: float | None = None) -> Iterator[None]:
        self._phase = (phase, deadline_s or self.config.control_deadline_s)
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    # --- failures ---

    def drop(self, link: ServerLink, error: Exception, rank: str = "", tensor: str = "", words: str = "") -> None:
        """Marks a server dirty and leaves it out of the attempt. Raises where none is left, or where the policy is to
        stop and the server lives: one that died said nothing about the weights."""
        failure = self.failure(link, error, rank, tensor, words)
        link.dirty = True
        link.leave()
        if link in self.active:
            self.active.remove(link)
        if not self.active or (self.config.on_failure == "stop" and not self.died(link.address)):
            raise failure from error
        log.error("%s; going on without %s", failure, link.address)

    def failure(
        self, link: ServerLink | None, error: Exception, rank: str = "", tensor: str = "", words: str = ""
    ) -> WeightSyncError:
        """The error that users see, from what went wrong and where. `words` says more than the error does."""
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
        """Ends an attempt that failed: every server that took part is dirty and joins anew. Returns what to tell."""
        for link in self.active:
            link.dirty = True
            link.leave()
        if isinstance(error, Retry):
            return {"retry": True}
        failure = self.failure(None, error)
        places = {name: getattr(failure, name) for name in ("server", "rank", "phase", "tensor")}
        return {"message": str(failure), **places}

    def blame(self, outcomes: Sequence[dict[str, Any] | None]) -> None:
        """Finds who broke a transfer, drops them, and raises `Retry`; or WeightSyncError, by the policy.

        `outcomes` are the trainer ranks' own reports, None where one is missing. Those that lost a connection or waited
        in vain are rarely at fault: a server that died is, else one that is silent, or a trainer rank that reports
        nothing. Beside one that died a silent one may only be slow: the next attempt asks it again.
        """
        deadline = Deadline(EXPLAIN_S)
        told = {link: error for link in self.active if (error := link.verdict(deadline)) is not None}
        at_fault = [link for link, error in told.items() if not isinstance(error, (RankFailure, NoAnswer))]
        silent = [link for link, error in told.items() if isinstance(error, NoAnswer)]
        at_fault = at_fault or [link for link in silent if self.died(link.address)] or silent
        lost = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        errors = [outcome for outcome in outcomes if outcome is not None and "error" in outcome]
        if not at_fault and lost:
            reports = "".join(f"; {link.address}: {error}" for link, error in told.items())
            who = f"trainer rank {lost[0]} did not report that it has sent its part{reports}"
            raise self.failure(None, RuntimeError(who), rank=f"trainer rank {lost[0]}")
        at_fault = at_fault or [link for link in told if not getattr(told[link], "peer", "")]
        if not at_fault and (own := [outcome for outcome in errors if not outcome.get("peer")]):
            raise self.failure(None, RuntimeError(own[0]["error"]), tensor=own[0].get("tensor", ""))
        at_fault = at_fault or [link for link in self.active if any(_about(outcome, link) for outcome in errors)]
        for link in at_fault or list(told):
            about: dict[str, Any] = next((outcome for outcome in errors if _about(outcome, link)), {})
            words = "; ".join(str(part) for part in (told.get(link), about.get("error")) if part)
            rank = str(about.get("peer", "")).partition(" of ")[0]
            self.drop(link, told.get(link) or RuntimeError(words), rank, about.get("tensor", ""), words)
        raise Retry


def _about(outcome: dict[str, Any], link: ServerLink) -> bool:
    """Whether a trainer rank's report is about this server."""
    return bool(outcome.get("peer", "").endswith(f" of server {link.index}"))
