"""The exact path of one attempt: all ranks make the same plan, compare its hash, and run their parts of it.

Ranks agree through the store. Rank 0 passes its coordinator, other ranks None.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from megarl.reshard.plan.planner import PlanError
from megarl.reshard.sync.attempt import AttemptSpec, TransferTotals, key
from megarl.reshard.sync.coordinator import FAILURES, Coordinator, Retry
from megarl.reshard.sync.places import check_visible
from megarl.reshard.sync.server_link import EXPLAIN_S, ServerLink
from megarl.reshard.sync.trainer_rank import TrainerRank
from megarl.reshard.transfer.digests import BucketSample, VerificationError, check_messages, relays_at_fault
from megarl.reshard.transfer.shard_transfer import TransferError
from megarl.reshard.transfer.store import POLL_S, Deadline, read, read_bulk, write, write_bulk


class CalledOff(RuntimeError):
    """Rank 0 ended the attempt; its verdict says why."""


@dataclass(frozen=True)
class ShardAttempt:
    """One attempt as one trainer rank runs it on the exact path."""

    store: Store
    number: int
    spec: AttemptSpec
    trainer_rank: TrainerRank
    connect_s: float
    transfer_s: float

    def key(self, *parts: object) -> str:
        return key(self.number, *parts)


def run(attempt: ShardAttempt, coordinator: Coordinator | None) -> TransferTotals:
    """Carries an attempt out until the servers hold the weights, proven. Only rank 0 returns more than zeros.

    Raises:
        WeightSyncError, Retry: on rank 0, see `Coordinator.attribute_failure`.
        CalledOff: on other ranks, as well as errors of their own; rank 0's verdict says what to raise in their place.
    """
    if coordinator is None:
        _prepare(attempt)
        _await_go(attempt)
        _send(attempt)
        return TransferTotals()
    with coordinator.timed("plan", attempt.connect_s):
        _agree_on_plan(attempt, coordinator)
    with coordinator.timed("transfer", attempt.transfer_s):
        deadline = Deadline(attempt.transfer_s + EXPLAIN_S)
        try:
            _send(attempt)
        except TransferError:
            attempt.trainer_rank.leave()  # wakes peers that wait for this rank; its outcome is written
        outcomes = _collect_outcomes(attempt, coordinator, deadline)
        if any(outcome is None or "error" in outcome for outcome in outcomes):
            attempt.trainer_rank.leave()
            coordinator.attribute_failure(outcomes)
    return _prove(attempt, coordinator, [outcome for outcome in outcomes if outcome is not None])


def _prepare(attempt: ShardAttempt) -> str:
    """Joins the groups and makes the plan. Publishes the plan's hash, or the error, and returns the hash."""
    hash_key = attempt.key("hash", "trainer", attempt.trainer_rank.rank)
    try:
        plan_hash = attempt.trainer_rank.prepare(attempt.spec, Deadline(attempt.connect_s))
    except FAILURES as error:
        write(attempt.store, hash_key, {"error": f"{type(error).__name__}: {error}"})
        raise
    write(attempt.store, hash_key, {"hash": plan_hash})
    return plan_hash


def _agree_on_plan(attempt: ShardAttempt, coordinator: Coordinator) -> None:
    """Rank 0: reads the hash of every rank's plan, and lets the transfer begin if all are equal."""
    deadline = Deadline(attempt.connect_s)
    reports: list[dict[str, Any]] = []

    def watch() -> None:
        for link in coordinator.active:
            link.watch()

    try:
        plan_hash = _prepare(attempt)
        if mapped := {i for i, server in enumerate(attempt.spec.servers) if server.transport_name == "cuda_ipc"}:
            assert attempt.trainer_rank.plan is not None, "prepared"
            world = read_bulk(attempt.store, f"world/{attempt.spec.world}", deadline)
            check_visible(attempt.trainer_rank.plan.messages, world, mapped)
        for rank in range(1, attempt.spec.senders):
            reports.append(read(attempt.store, attempt.key("hash", "trainer", rank), deadline, watch))
            _check_hash(plan_hash, reports[-1], f"trainer rank {rank}")
        for number, server, rank in attempt.spec.server_ranks():
            report = read(attempt.store, attempt.key("hash", "server", number), deadline, watch)
            _check_hash(plan_hash, report, f"rank {rank} of server {server.index}")
    except FAILURES as error:
        write(attempt.store, attempt.key("go"), False)  # frees servers that wait for it for the next attempt
        if isinstance(error, (PlanError, VerificationError)):
            raise
        attempt.trainer_rank.leave()
        own = {"error": str(error), "tensor": getattr(error, "tensor", ""), "peer": getattr(error, "peer", "")}
        plan = attempt.trainer_rank.plan
        relays_join = plan is not None and plan.is_relayed
        coordinator.attribute_failure([own, *(report for report in reports if "error" in report)], relays_join)
    write(attempt.store, attempt.key("go"), True)


def _check_hash(expected: str, report: dict[str, Any], who: str) -> None:
    if "error" in report:
        raise RuntimeError(f"{who} could not prepare: {report['error']}")
    if report["hash"] != expected:
        raise VerificationError(f"{who} made the plan {report['hash'][:12]} and trainer rank 0 {expected[:12]}", "")


def _await_go(attempt: ShardAttempt) -> None:
    """Waits for rank 0's word to begin. Raises CalledOff if it is no."""
    if not read(attempt.store, attempt.key("go"), Deadline(2 * attempt.connect_s)):
        raise CalledOff("rank 0 called the attempt off")


def _send(attempt: ShardAttempt) -> None:
    """Sends this rank's part. Publishes the outcome: {} and a report of the sends, or the error."""
    outcome_key = attempt.key("outcome", attempt.trainer_rank.rank)
    try:
        sent = attempt.trainer_rank.transfer(attempt.number, attempt.spec, Deadline(attempt.transfer_s))
    except FAILURES as error:
        outcome = {"error": str(error)}
        if isinstance(error, TransferError):
            outcome |= {"peer": error.peer, "tensor": error.tensor}
        write(attempt.store, outcome_key, outcome)
        raise
    write_bulk(attempt.store, outcome_key + "/sent", sent)
    write(attempt.store, outcome_key, {})


def _collect_outcomes(
    attempt: ShardAttempt, coordinator: Coordinator, deadline: Deadline
) -> list[dict[str, Any] | None]:
    """Every trainer rank's outcome, None where it is missing.

    Once a trainer rank or a server has failed, the remaining ranks have EXPLAIN_S to publish theirs.
    """
    outcomes: list[dict[str, Any] | None] = [None] * attempt.spec.senders
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
        if failed or any(link.order_error(None) for link in coordinator.active):
            attempt.trainer_rank.leave()
            deadline = deadline if deadline.seconds == EXPLAIN_S else Deadline(EXPLAIN_S)
        try:
            deadline.left()
        except TimeoutError:
            break
        time.sleep(POLL_S)
    return outcomes


def _prove(attempt: ShardAttempt, coordinator: Coordinator, outcomes: list[dict[str, Any]]) -> TransferTotals:
    """Waits until the servers have applied the weights, ends their update sessions and compares the digests."""
    plan = attempt.trainer_rank.plan
    assert plan is not None, "made before the transfer"
    reports: dict[int, dict[str, Any]] = {}  # of each destination rank
    verified: dict[str, int] = {}
    with coordinator.timed("apply", attempt.transfer_s):
        deadline = Deadline(attempt.transfer_s)
        if any(link.order_error(deadline) for link in coordinator.active):
            attempt.trainer_rank.leave()
            coordinator.attribute_failure(outcomes)
        for link in coordinator.active:
            rank_reports = link.finish(deadline)
            for number, server, rank in attempt.spec.server_ranks():
                if server.index == link.index:
                    reports[number] = rank_reports[rank]
    coordinator.end()
    with coordinator.timed("verify", attempt.transfer_s):
        sample = BucketSample(attempt.spec.modulus, attempt.spec.remainder)
        sent = [{int(bucket): digests for bucket, digests in outcome["digests"]} for outcome in outcomes]
        ranks_of = {
            server.index: [number for number, s, _ in attempt.spec.server_ranks() if s == server]
            for server in attempt.spec.servers
        }

        def check(link: ServerLink) -> int:
            compared = 0
            for rank, number in enumerate(ranks_of[link.index]):
                if not attempt.spec.delta and reports[number]["bytes"] != plan.bytes_in[number]:
                    raise VerificationError(
                        f"rank {rank} received {reports[number]['bytes']} of {plan.bytes_in[number]} bytes", ""
                    )
                held = {int(index): digests for index, digests in reports[number]["held"]}
                compared += check_messages(plan, sample, sent, number, held, f"rank {rank}")
            return compared

        errors: dict[ServerLink, Exception] = {}
        for link in coordinator.active:
            try:
                verified[link.address] = check(link)
            except FAILURES as error:
                errors[link] = error
        _drop_wrong(attempt, coordinator, errors)
    return TransferTotals(
        sum(outcome["bytes"] for outcome in outcomes),
        sum(outcome["dense_bytes"] for outcome in outcomes),
        sum(report["forwarded"] for report in reports.values()),
        verified,
        tuple(reports[number]["bytes"] for number in sorted(reports)),
    )


def _drop_wrong(attempt: ShardAttempt, coordinator: Coordinator, errors: dict[ServerLink, Exception]) -> None:
    """Drops the servers that hold other weights than were sent, by their `errors`.

    Where a relay sent them on, it is dropped in their place, and all others are to be sent everything again.

    Raises:
        WeightSyncError: the policy is to stop, or no server is left.
        Retry: a relay was at fault.
    """
    plan = attempt.trainer_rank.plan
    assert plan is not None, "made before the transfer"
    wrong = {index for error in errors.values() for index in getattr(error, "messages", ())}
    relays = relays_at_fault(plan, wrong)
    if not relays:
        for link, error in errors.items():
            coordinator.drop(link, error)
        return
    told = "; ".join(f"{link.address}: {error}" for link, error in errors.items())
    tensor = next(tensor for error in errors.values() if (tensor := getattr(error, "tensor", "")))
    ranks = {server.index: rank for number, server, rank in attempt.spec.server_ranks() if number in relays}
    for link in [link for link in coordinator.active if link.index in ranks]:
        cause = RuntimeError(f"weights that came through it differ from those sent: {told}")
        coordinator.drop(link, cause, str(ranks[link.index]), tensor)
    raise Retry
