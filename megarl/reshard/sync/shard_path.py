"""The exact path of one attempt: all ranks make the same plan, compare its hash, and run their parts of it.

Ranks agree through the store; `Attempt` is what they share. Rank 0 hands in the coordinator, the others None.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from megarl.reshard.plan.planner import PlanError
from megarl.reshard.sync.attempt import AttemptSpec, key
from megarl.reshard.sync.coordinator import FAILURES, Coordinator
from megarl.reshard.sync.server_link import EXPLAIN_S
from megarl.reshard.sync.trainer_rank import TrainerRank
from megarl.reshard.transfer.digests import Sample, VerificationError, check_messages
from megarl.reshard.transfer.shard_transfer import TransferError
from megarl.reshard.transfer.store import POLL_S, Deadline, read, read_bulk, write, write_bulk


class CalledOff(RuntimeError):
    """Rank 0 ended the attempt; its verdict says why."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a sync, as one trainer rank sees it."""

    store: Store
    sequence: int
    job: AttemptSpec
    member: TrainerRank
    connect_s: float
    transfer_s: float

    def key(self, *parts: object) -> str:
        return key(self.sequence, *parts)


@dataclass(frozen=True)
class TransferOutcome:
    """What an attempt moved: bytes sent, bytes without delta, pieces of tensors proven equal, and the bytes that each
    server rank received."""

    nbytes: int = 0
    dense_nbytes: int = 0
    verified: int = 0
    received: tuple[int, ...] = ()


def run(attempt: Attempt, chief: Coordinator | None) -> TransferOutcome:
    """Carries an attempt out until the servers hold the weights, proven. What rank 0 returns counts.

    Raises:
        WeightSyncError, Retry: on rank 0, see `Coordinator.blame`. CalledOff, or this rank's own failure: on others,
            where the verdict of rank 0 says what to raise.
    """
    if chief is None:
        _prepare(attempt)
        _await_go(attempt)
        _send(attempt)
        return TransferOutcome()
    with chief.timed("plan", attempt.connect_s):
        _agree_on_plan(attempt, chief)
    with chief.timed("transfer", attempt.transfer_s):
        deadline = Deadline(attempt.transfer_s + EXPLAIN_S)
        try:
            _send(attempt)
        except TransferError:
            attempt.member.leave()  # wakes whoever waits for this rank; its outcome is written
        outcomes = _collect(attempt, chief, deadline)
        if any(outcome is None or "error" in outcome for outcome in outcomes):
            attempt.member.leave()
            chief.blame(outcomes)
    return _prove(attempt, chief, [outcome for outcome in outcomes if outcome is not None])


def _prepare(attempt: Attempt) -> str:
    """Joins and plans. Tells the plan's hash, or why there is none."""
    mine = attempt.key("hash", "trainer", attempt.member.rank)
    try:
        found = attempt.member.prepare(attempt.job, Deadline(attempt.connect_s))
    except FAILURES as error:
        write(attempt.store, mine, {"error": f"{type(error).__name__}: {error}"})
        raise
    write(attempt.store, mine, {"hash": found})
    return found


def _agree_on_plan(attempt: Attempt, chief: Coordinator) -> None:
    """Rank 0: reads the hash of every rank's plan, and lets the transfer begin if all are equal."""
    deadline = Deadline(attempt.connect_s)
    reports: list[dict[str, Any]] = []

    def watch() -> None:
        for link in chief.active:
            link.watch()

    try:
        mine = _prepare(attempt)
        for rank in range(1, attempt.job.senders):
            reports.append(read(attempt.store, attempt.key("hash", "trainer", rank), deadline, watch))
            _check_hash(mine, reports[-1], f"trainer rank {rank}")
        for number, server, rank in attempt.job.places():
            told = read(attempt.store, attempt.key("hash", "server", number), deadline, watch)
            _check_hash(mine, told, f"rank {rank} of server {server.index}")
    except FAILURES as error:
        write(attempt.store, attempt.key("go"), False)  # servers that wait for it are free for the next attempt
        if isinstance(error, (PlanError, VerificationError)):
            raise
        attempt.member.leave()
        chief.blame([{"error": str(error)}, *(report for report in reports if "error" in report)])
    write(attempt.store, attempt.key("go"), True)


def _check_hash(mine: str, told: dict[str, Any], who: str) -> None:
    if "error" in told:
        raise RuntimeError(f"{who} could not prepare: {told['error']}")
    if told["hash"] != mine:
        raise VerificationError(f"{who} made the plan {told['hash'][:12]} and trainer rank 0 {mine[:12]}", "")


def _await_go(attempt: Attempt) -> None:
    if not read(attempt.store, attempt.key("go"), Deadline(2 * attempt.connect_s)):
        raise CalledOff("rank 0 called the attempt off")


def _send(attempt: Attempt) -> None:
    """Sends this rank's part. Tells how it went."""
    mine = attempt.key("outcome", attempt.member.rank)
    try:
        sent = attempt.member.transfer(attempt.sequence, attempt.job, Deadline(attempt.transfer_s))
    except FAILURES as error:
        told = {"error": str(error)}
        if isinstance(error, TransferError):
            told |= {"peer": error.peer, "tensor": error.tensor}
        write(attempt.store, mine, told)
        raise
    write_bulk(attempt.store, mine + "/sent", sent)
    write(attempt.store, mine, {})


def _collect(attempt: Attempt, chief: Coordinator, deadline: Deadline) -> list[dict[str, Any] | None]:
    """Every trainer rank's outcome. Once one has failed, or a server has, the others get a moment to tell theirs."""
    outcomes: list[dict[str, Any] | None] = [None] * attempt.job.senders
    while None in outcomes:
        for rank in [rank for rank, outcome in enumerate(outcomes) if outcome is None]:
            name = attempt.key("outcome", rank)
            if attempt.store.check([name]):
                outcomes[rank] = read(attempt.store, name, deadline)
                if outcomes[rank] == {}:
                    outcomes[rank] = read_bulk(attempt.store, name + "/sent", deadline)
        if None not in outcomes:
            break
        failed = any(outcome is not None and "error" in outcome for outcome in outcomes)
        if failed or any(link.verdict(None) for link in chief.active):
            attempt.member.leave()
            deadline = deadline if deadline.seconds == EXPLAIN_S else Deadline(EXPLAIN_S)
        try:
            deadline.left()
        except TimeoutError:
            break
        time.sleep(POLL_S)
    return outcomes


def _prove(attempt: Attempt, chief: Coordinator, outcomes: list[dict[str, Any]]) -> TransferOutcome:
    """Waits until the servers have applied the weights, ends their update sessions and compares the digests."""
    plan = attempt.member.plan
    assert plan is not None, "made before the transfer"
    results: dict[int, dict[str, Any]] = {}
    verified = 0
    with chief.timed("apply", attempt.transfer_s):
        deadline = Deadline(attempt.transfer_s)
        if any(link.verdict(deadline) for link in chief.active):
            attempt.member.leave()
            chief.blame(outcomes)
        for link in chief.active:
            told = link.finish(deadline)
            for number, server, rank in attempt.job.places():
                if server.index == link.index:
                    results[number] = told[rank]
    chief.end()
    with chief.timed("verify", attempt.transfer_s):
        sample = Sample(attempt.job.modulus, attempt.job.remainder)
        sent = [{int(bucket): digests for bucket, digests in outcome["digests"]} for outcome in outcomes]
        of = {server.index: [n for n, s, _ in attempt.job.places() if s == server] for server in attempt.job.servers}

        def check(link: Any) -> None:
            nonlocal verified
            for rank, number in enumerate(of[link.index]):
                if not attempt.job.delta and results[number]["bytes"] != plan.bytes_in[number]:
                    raise VerificationError(
                        f"rank {rank} received {results[number]['bytes']} of {plan.bytes_in[number]} bytes", ""
                    )
                held = {int(index): digests for index, digests in results[number]["held"]}
                verified += check_messages(plan, sample, sent, number, held, f"rank {rank}")

        chief.each(check)
    received = tuple(results[number]["bytes"] for number in sorted(results))
    return TransferOutcome(
        sum(o["bytes"] for o in outcomes), sum(o["dense_bytes"] for o in outcomes), verified, received
    )
