"""Rollouts that continue while the trainer trains, never older than allowed, with none lost and none repeated.

    loader --prompts--> under way --episodes--> finished --the oldest first--> a batch
               |            |                       |
           as capacity   requeued if           rejected, with the reason:
             allows      servers failed        no signal, failed, timed out, ...

The trainer's version rises by one a step, and a batch is taken at each. Let h be `max_head_offpolicyness`, and B the
prompts in a batch. At most (h + 1) B prompts are between loader and trainer, less those already handed out at this
version. A batch takes the oldest finished prompts. It waits while a prompt that must not grow older is still under way.

Consider the prompts that were started at version u or before. After a batch is taken at version t, at most
(u + h - t) B of them are left, and none at t = u + h. So no trained token is more than h versions old.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.knobs import UserError
from megarl.rollout.api import GenerationError, InferenceEngine, RequestRefused, RolloutWorkflow
from megarl.rollout.executor import Attend, LoopThread, NoSamplesError, WorkflowError, run_episode
from megarl.types import ORIGIN, Episode, PackedBatch, rewards_of_samples

ShouldAccept = Callable[[PackedBatch], bool]
CALL_DEADLINE_S = 60.0  # for calls that the loop answers at once


@dataclass(frozen=True)
class StreamLimits:
    """Bounds of a stream; the knobs are in `RolloutConfig`."""

    max_head_offpolicyness: int
    episode_timeout_s: float
    max_requeues: int
    max_failures: int


@dataclass
class Ticket:
    """A prompt between loader and trainer."""

    number: int  # in the order of the loader, over the whole run
    item: dict[str, Any]
    version: int = 0  # the trainer's, when the episode was started
    requeued: int = 0


class RolloutStream:
    """Episodes of the prompts of `loader`, `group_size` for each, under `workflow`.

    All state belongs to the loop of `thread`. `should_accept` sees a prompt's packed group. A refused prompt is listed
    as rejected and, unless `dynamic_bs`, replaced by another one.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        thread: LoopThread,
        loader: Any,
        workflow: RolloutWorkflow,
        limits: StreamLimits,
        *,
        batch_size: int,
        should_accept: ShouldAccept | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> None:
        self.engine = engine
        self.loader = loader
        self.workflow = workflow
        self.limits = limits
        self.batch_size = batch_size
        self.should_accept = should_accept
        self.group_size = group_size
        self.dynamic_bs = dynamic_bs
        self._thread = thread
        self._source: Iterator[Any] | None = None
        self._queue: collections.deque[Ticket] = collections.deque()  # read from the loader, or requeued
        self._under_way: dict[int, tuple[Ticket, asyncio.Task[None]]] = {}
        self._finished: dict[int, tuple[Ticket, Episode]] = {}
        self._rejected: list[Episode] = []  # since the last batch
        self._read = 0  # prompts read from the loader
        self._handed = 0  # prompts handed out at this version
        self._version = engine.get_version()
        self._is_served = True  # False while servers receive `_version`: prompts would get tokens of the one before
        self._failures = 0  # in a row
        self._error: BaseException | None = None
        self._changed = asyncio.Condition()
        self._sampled = 0  # trained tokens of the episodes that ended since the last batch
        self._busy_s = 0.0  # seconds with episodes under way since the last batch, counted until `_counted`
        self._counted = time.perf_counter()
        self.sampled = 0.0, 0.0  # tokens, and seconds with episodes under way, between the last two batches

    # -- the trainer's side -------------------------------------------------------------------------------------

    def next_batch(self, timeout_s: float, attend: Attend[list[Episode]] | None = None) -> list[Episode]:
        """Returns the next batch's episodes in the order of their prompts, then the rejected ones since the last batch.

        `attend` may supervise the wait and end it with an error of its own; episodes under way continue.

        Raises:
            NoSamplesError: many episodes in a row failed, each with its cause.
            GenerationError: no server is left.
            TimeoutError: the batch was not complete after `timeout_s`.
        """
        what = f"a batch of {self.batch_size} prompts under {type(self.workflow).__name__}"
        work = self._next_batch()
        return self._thread.run(attend(work) if attend is not None else work, timeout_s, what)

    def set_version(self, version: int) -> None:
        """Starts prompts at the trainer's version. A new one makes room for one more batch of prompts under way."""
        self._thread.run(self._advance(version, is_served=True), CALL_DEADLINE_S, "starting episodes")

    def expect_version(self, version: int) -> None:
        """Takes batches at the trainer's version, which the servers do not have yet. Starts no prompt until they do."""
        self._thread.run(self._advance(version, is_served=False), CALL_DEADLINE_S, "expecting a version")

    def state_dict(self) -> dict[str, Any]:
        """Saves every prompt between loader and trainer, and the loader's position. Prompts under way are run again."""

        async def collect() -> dict[str, Any]:
            open_tickets = [t for t, _ in self._under_way.values()] + list(self._queue)
            waiting = sorted([*open_tickets, *(t for t, _ in self._finished.values())], key=lambda t: t.number)
            state = {
                "read": self._read,
                "waiting": [{"number": t.number, "item": t.item} for t in waiting],
                "rejected": [_saved(episode) for episode in self._rejected],
            }
            if hasattr(self.loader, "state_dict"):
                state["loader"] = self.loader.state_dict()
            return state

        return self._thread.run(collect(), CALL_DEADLINE_S, "saving the state of the rollouts")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; call it before the first batch."""

        async def restore() -> None:
            if hasattr(self.loader, "load_state_dict"):
                self.loader.load_state_dict(state["loader"])
            self._read = state["read"]
            self._queue.extend(Ticket(entry["number"], dict(entry["item"])) for entry in state["waiting"])
            self._rejected += [_restored(entry) for entry in state["rejected"]]

        self._thread.run(restore(), CALL_DEADLINE_S, "restoring the state of the rollouts")

    # -- on the loop --------------------------------------------------------------------------------------------

    async def _advance(self, version: int, *, is_served: bool) -> None:
        if version != self._version:
            self._version, self._handed = version, 0
        self._is_served = is_served
        self._feed()

    async def _next_batch(self) -> list[Episode]:
        self._version = self.engine.get_version()
        self._feed()
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or self._complete())
        if self._error is not None:
            raise self._error
        oldest = sorted(self._finished.values(), key=lambda pair: (pair[0].version, pair[0].number))
        taken = sorted(oldest[: self.batch_size], key=lambda pair: pair[0].number)
        for ticket, _ in taken:
            del self._finished[ticket.number]
        self._handed += self.batch_size
        self._count_busy()
        self.sampled = float(self._sampled), self._busy_s
        self._sampled, self._busy_s = 0, 0.0
        rejected, self._rejected = self._rejected, []
        return [episode for _, episode in taken] + rejected

    def _count_busy(self) -> None:
        """Adds the time since the last call, if episodes were under way.

        Call it before the first episode starts and before the last one ends.
        """
        now = time.perf_counter()
        if self._under_way:
            self._busy_s += now - self._counted
        self._counted = now

    def _complete(self) -> bool:
        """True if enough prompts have finished, and every prompt that must not grow older."""
        if len(self._finished) < self.batch_size:
            return False
        under_way = [ticket.version for ticket, _ in self._under_way.values()]
        done = [ticket.version for ticket, _ in self._finished.values()]
        for version in {*under_way, *done} if under_way else ():
            may_stay = (version + self.limits.max_head_offpolicyness - self._version) * self.batch_size
            finished = sum(v <= version for v in done)
            awaited = sum(v <= version for v in under_way)
            if awaited and finished + awaited - max(may_stay, 0) > min(finished, self.batch_size):
                return False
        return True

    def _feed(self) -> None:
        """Starts as many episodes as the bound allows, once the servers have the trainer's version."""
        if not self._is_served:
            return
        room = (self.limits.max_head_offpolicyness + 1) * self.batch_size - self._handed
        while len(self._under_way) + len(self._finished) < room and self._error is None:
            try:
                ticket = self._queue.popleft() if self._queue else self._read_one()
            except Exception as error:  # a loader may raise any; the trainer gets it with its next batch
                self._stop(error)
                return
            ticket.version = self._version
            self._count_busy()
            task = asyncio.get_running_loop().create_task(self._run(ticket))
            self._under_way[ticket.number] = (ticket, task)

    def _read_one(self) -> Ticket:
        """The next prompt of the loader, which starts over at its end."""
        for _ in range(2):
            if self._source is None:
                self._source = iter(self.loader)
            for items in self._source:
                for item in items:
                    self._queue.append(Ticket(self._read, dict(item)))
                    self._read += 1
                return self._queue.popleft()
            self._source = None
        raise UserError("the loader has no prompts; give it at least one")

    async def _run(self, ticket: Ticket) -> None:
        """Runs one prompt to its end. The trainer gets what cannot be accounted for, such as an error of its filter."""
        try:
            await self._account(ticket)
        except Exception as error:
            self._stop(error)
        async with self._changed:
            self._changed.notify_all()

    async def _account(self, ticket: Ticket) -> None:
        """Runs one prompt and accounts for its outcome, once."""
        limit = self.limits.episode_timeout_s
        item = {"prompt_id": str(ticket.number), **ticket.item}
        origin = ticket.item.get(ORIGIN, {})
        started = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                episode = await run_episode(self.engine, ticket.number, item, self.workflow, self.group_size)
        except TimeoutError:
            took = time.monotonic() - started
            late = Episode(item["prompt_id"], None, f"timed out after {took:.0f} s", origin=origin)
            self._end(ticket, late, failed=True)
        except UserError as error:
            self._stop(error)
        except Exception as error:
            self._failed(ticket, item["prompt_id"], error)
        else:
            unusable = episode.group is None and bool(episode.dropped)  # all its samples were left out
            self._sampled += int(episode.group["loss_mask"].sum()) if episode.group is not None else 0
            if episode.group is not None and self.should_accept is not None and not self.should_accept(episode.group):
                rewards = tuple(rewards_of_samples(episode.group).tolist())
                reason = "refused by should_accept_fn"
                episode = Episode(episode.prompt_id, None, reason, episode.dropped, origin, rewards)
            self._end(ticket, episode, failed=unusable)

    def _failed(self, ticket: Ticket, prompt_id: str, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, WorkflowError) else error
        if isinstance(cause, GenerationError) and not isinstance(cause, RequestRefused):
            if cause.fatal:
                self._stop(cause)
                return
            if ticket.requeued < self.limits.max_requeues:  # the servers' fault, not the prompt's
                ticket.requeued += 1
                self._count_busy()
                del self._under_way[ticket.number]
                self._queue.appendleft(ticket)
                self._feed()
                return
        origin = ticket.item.get(ORIGIN, {})
        self._end(ticket, Episode(prompt_id, None, str(error), origin=origin), failed=True)

    def _end(self, ticket: Ticket, episode: Episode, failed: bool = False) -> None:
        self._count_busy()
        del self._under_way[ticket.number]
        self._failures = self._failures + 1 if failed else 0
        if self._failures > self.limits.max_failures:
            self._stop(NoSamplesError(f"{self._failures} episodes failed in a row, the last: {episode.reason}"))
        if episode.group is None and not self.dynamic_bs:
            self._rejected.append(episode)
            self._feed()
        else:
            self._finished[ticket.number] = (ticket, episode)

    def _stop(self, error: BaseException) -> None:
        """Ends the run: the trainer gets `error` at its next batch, or now if it waits."""
        self._error = self._error or error


def _saved(episode: Episode) -> dict[str, Any]:
    """A rejected episode as a checkpoint holds it."""
    measured = {"origin": episode.origin, "rewards": list(episode.rewards)} if episode.origin else {}
    return {"prompt_id": episode.prompt_id, "reason": episode.reason, **measured}


def _restored(entry: Mapping[str, Any]) -> Episode:
    rewards = tuple(entry.get("rewards", ()))
    return Episode(entry["prompt_id"], None, entry["reason"], origin=dict(entry.get("origin", {})), rewards=rewards)
