"""Runs reward functions in supervised processes. A hang, a crash or too much memory costs one sample only.

    concurrent calls --> shares for idle workers, or for new ones if all are stuck --> value or RewardError
                             |
                             +-- no answer within time_limit_s: the worker is killed, others take the rest of its share

Time in which a worker waits for a processor does not count, so a busy machine scores as a quiet one. That of programs
which it starts counts. A worker answers call by call, and returns the rest of a share that takes long.
"""

from __future__ import annotations

import asyncio
import collections
import json
import math
import pickle
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from megarl.forks import ForkedProcess, ForkError, ForkServer, StartError
from megarl.knobs import MAX_SECONDS, MAX_WEIGHT, UserError, check_ranges, knob
from megarl.rewards.worker import PickledRewards
from megarl.sandbox.activity import waited_s
from megarl.types import Reward, RewardError

READ_S = 0.01  # for answers that came while this process did not go on
PATIENCE_S = 0.1  # a call waits this long for a worker, or behind a slow one, before another worker takes it


@dataclass(frozen=True)
class RewardConfig:
    """Reward functions, their weights and the limits of their processes."""

    functions: list[str] = knob(
        factory=lambda: ["gsm8k"], meaning="reward functions: names of megarl.rewards, or MODULE.FUNCTION of your own"
    )
    weights: list[float] = knob(
        factory=list,
        meaning="weight of each function in the reward; empty: 1 for all",
        least=-MAX_WEIGHT,
        most=MAX_WEIGHT,
    )
    time_limit_s: float = knob(
        10.0,
        "seconds to score one completion, without those in line for a processor; then its sample is masked and counted",
        above=0,
        most=MAX_SECONDS,
    )
    memory_limit_mb: int = knob(4096, "address space that a scoring process may add, in MiB", least=64, most=2**24)
    workers: int = knob(2, "scoring processes while none of them hangs", least=1, most=4096)
    max_workers: int = knob(64, "maximum scoring processes, if some hang or are slow", least=1, most=4096)

    def __post_init__(self) -> None:
        check_ranges(self, "rewards")
        if not self.functions:
            raise UserError("rewards.functions is empty; name at least one, such as gsm8k")
        if self.weights and len(self.weights) != len(self.functions):
            raise UserError(
                f"rewards.weights has {len(self.weights)} values and rewards.functions {len(self.functions)}; give one "
                "weight per function, or none"
            )
        if self.workers > self.max_workers:
            raise UserError(
                f"rewards.workers={self.workers} must be at most rewards.max_workers="
                f"{self.max_workers}; change one of them"
            )


class RewardPool:
    """Scores completions with `functions` in separate processes. The pool itself is an async reward function.

    `await pool(prompt, completions, prompt_ids, completion_ids, **data)` returns the weighted sum, with the functions'
    values in its `parts`. `await pool.score(...)` returns only the values. Both raise `RewardError` if a function
    fails, or if none applies. The functions have the signature of `RLVRWorkflow`'s rewards, and are sync or async:
    `(prompt, completions, prompt_ids, completion_ids, **data) -> float | None`. None does not count in the sum.

    If one of them takes lists (`lists.ListReward`), `takes_lists` is true: `score_group` then scores all completions of
    a prompt in one process.

    A context manager. Linux ends the processes with the thread that creates the pool, so that thread must live as long
    as the pool. Use it from one asyncio loop.

    Raises:
        UserError: the functions cannot be loaded in another process.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], config: RewardConfig | None = None) -> None:
        self.config = config or RewardConfig()
        self.weights = self.config.weights or [1.0] * len(functions)
        self.takes_lists = any(getattr(function, "takes_lists", False) for function in functions)
        self.failures: collections.Counter[str] = collections.Counter()  # by cause
        self._idle: collections.deque[_Worker] = collections.deque()
        self._live: set[_Worker] = set()
        self._queue: collections.deque[_Call] = collections.deque()  # calls without a worker
        self._forking = 0
        self._answers = 0
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        scorer = pickle.dumps(PickledRewards(cloudpickle.dumps(list(functions))))
        try:
            self._server = ForkServer("megarl.rewards.worker", scorer, self.config.memory_limit_mb)
        except StartError as error:
            raise UserError(f"the reward functions cannot be loaded in another process: {error}") from error

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        for live in list(self._live):
            live.kill()
        self._live.clear()
        self._idle.clear()
        self._server.close()

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> Reward:
        return self._sum(await self.score(prompt, completions, prompt_ids, completion_ids, **data))

    async def score(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> list[float | None]:
        """The value of every function for one completion.

        Raises:
            RewardError: the call took too long, its process died, or a function raised or returned no finite number.
        """
        (result,) = await self._results(prompt, prompt_ids, [completions], [completion_ids], data)
        if isinstance(result, str):
            self.failures["raised"] += 1
            raise RewardError(result)
        return result

    async def score_group(
        self,
        prompt: str,
        prompt_ids: list[int],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        data: Mapping[str, Any],
    ) -> list[Reward | RewardError]:
        """The weighted sums for all completions of a prompt, or the failures. Their time limits add up."""
        try:
            results = await self._results(prompt, prompt_ids, completions, completion_ids, data)
        except RewardError as error:
            return [error] * len(completions)
        rewards: list[Reward | RewardError] = []
        for result in results:
            try:
                if isinstance(result, str):
                    self.failures["raised"] += 1
                    raise RewardError(result)
                rewards.append(self._sum(result))
            except RewardError as error:
                rewards.append(error)
        return rewards

    def _sum(self, values: Sequence[float | None]) -> Reward:
        """The weighted sum of the values that apply; the others are NaN in its `parts`."""
        applied = [(weight, value) for weight, value in zip(self.weights, values, strict=True) if value is not None]
        if not applied:
            self.failures["none"] += 1
            raise RewardError("no reward function applies: each returned None; return a number from one of them")
        parts = [math.nan if value is None else value for value in values]
        return Reward(sum(weight * value for weight, value in applied), parts)

    async def _results(
        self,
        prompt: str,
        prompt_ids: list[int],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        data: Mapping[str, Any],
    ) -> list[list[float | None] | str]:
        """The values of the functions for each completion, or the cause of its failure; see `worker.score`."""
        texts, ids = list(completions), list(completion_ids)
        values = {"prompt": prompt, "prompt_ids": prompt_ids, "completions": texts, "completion_ids": ids}
        loop = asyncio.get_running_loop()
        limit_s = self.config.time_limit_s * len(texts)
        call = _Call(pickle.dumps({**values, "data": dict(data)}), limit_s, loop.create_future())
        self._queue.append(call)
        if len(self._queue) == 1:
            loop.call_soon(self._hand_out)  # later, together with all calls of this loop iteration
        try:
            return await call.results
        except asyncio.CancelledError:
            for busy in [busy for busy in self._live if busy.scoring is call]:
                self._end(busy)
            raise

    def _hand_out(self) -> None:
        """Divides queued calls among the idle workers. If calls remain, starts workers up to `rewards.workers`."""
        while self._queue and self._idle:
            count = -(-len(self._queue) // len(self._idle))
            self._begin(self._work(self._idle.pop(), [self._queue.popleft() for _ in range(count)]))
        self._grow(self.config.workers - len(self._live) - self._forking)
        if self._watch is None or self._watch.done():
            self._watch = self._begin(self._watch_over())

    async def _work(self, worker_: _Worker, share: list[_Call]) -> None:
        """Lets a worker score a share, one call after the other. Calls that it does not reach go back to the queue."""
        worker_.send(share)
        while worker_.share:
            call = worker_.next()
            try:
                answer = await worker_.answer()
            except (ConnectionError, asyncio.IncompleteReadError):
                if worker_.late:
                    self._fail(call, "time", f"no answer within rewards.time_limit_s={self._limit(call)}")
                else:
                    self._fail(call, "died", "its process died (exit, crash or memory limit)")
                self._end(worker_)
                break
            self._answers += 1
            if not call.results.done():  # the caller may have been cancelled
                call.results.set_result(answer["results"])
            if not answer["more"]:
                break
            if not worker_.share:  # it would go on with calls that others have taken meanwhile
                self._end(worker_)
        worker_.scoring = None
        self._take_back(worker_)
        self._free(worker_)

    def _take_back(self, worker_: _Worker) -> None:
        """Returns the calls that a worker has not begun to the front of the queue."""
        self._queue.extendleft(reversed(worker_.share))
        worker_.share.clear()

    def _limit(self, call: _Call) -> str:
        """The time limit of a call, in words."""
        count = round(call.limit_s / self.config.time_limit_s)
        return f"{self.config.time_limit_s:g}" + (f" for each of {count} completions" if count > 1 else "")

    def _fail(self, call: _Call, cause: str, message: str) -> None:
        if not call.results.done():  # otherwise the caller was cancelled
            self.failures[cause] += 1
            call.results.set_exception(RewardError(message))

    def _free(self, worker_: _Worker) -> None:
        """Marks a worker as idle unless it has ended. Once all are idle, ends the workers beyond `rewards.workers`."""
        if worker_ in self._live:
            self._idle.append(worker_)
        if self._queue:
            self._hand_out()
        while len(self._idle) == len(self._live) > self.config.workers:
            self._end(self._idle.pop())

    async def _watch_over(self) -> None:
        """Supervises the workers while there is work.

        Ends workers over the time limit, and redistributes calls that wait behind slow ones. If calls wait and none is
        answered, doubles the number of workers, up to `rewards.max_workers`.
        """
        while self._queue or len(self._idle) < len(self._live):
            answers_before = self._answers
            await asyncio.sleep(min(PATIENCE_S, self.config.time_limit_s))
            over = [(busy, busy.scoring) for busy in self._live if busy.is_over_its_limit()]
            if over:
                await asyncio.sleep(READ_S)
            for busy, call in over:
                if busy.scoring is call:
                    busy.late = True
                    self._end(busy)
            for busy in self._live:
                if busy.scoring is not None and time.monotonic() - busy.since > PATIENCE_S:
                    self._take_back(busy)
            if self._queue and self._idle:
                self._hand_out()
            elif self._answers == answers_before and self._forking == 0:
                self._grow(max(len(self._live), 1))

    def _grow(self, count: int) -> None:
        """Forks up to `count` workers, but no more than there are queued calls or room below `rewards.max_workers`."""
        room = self.config.max_workers - len(self._live) - self._forking
        for _ in range(min(count, room, len(self._queue))):
            self._forking += 1
            self._begin(self._fork())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task and keeps a reference to it, as asyncio itself holds only a weak one."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fork(self) -> None:
        try:
            new_worker: _Worker = await _Worker.connect(self._server)
        except (OSError, ForkError) as error:
            self._forking -= 1
            if self._queue:
                self._fail(self._queue.popleft(), "died", f"no scoring process could be started: {error}")
        else:
            self._forking -= 1
            self._live.add(new_worker)
            self._free(new_worker)

    def _end(self, worker_: _Worker) -> None:
        worker_.kill()
        self._live.discard(worker_)


@dataclass(eq=False)
class _Call:
    pickled: bytes
    limit_s: float
    results: asyncio.Future[list[list[float | None] | str]]


class _Worker(ForkedProcess):
    """A scoring process."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(pid, reader, writer)
        self.share: collections.deque[_Call] = collections.deque()  # calls not begun
        self.scoring: _Call | None = None
        self.late = False
        self.waited_before_s = 0.0  # for a processor, until the call that it works on

    def send(self, share: list[_Call]) -> None:
        """Sends a share of calls to the process."""
        self.share.extend(share)
        self.write(pickle.dumps([call.pickled for call in share]))

    def next(self) -> _Call:
        """Takes the next call of the share as the one being scored."""
        self.scoring = self.share.popleft()
        self.since = time.monotonic()
        self.waited_before_s = waited_s(self.pid)
        return self.scoring

    def scoring_s(self) -> float:
        """Seconds of the call, without those in which the process waited for a processor."""
        passed = time.monotonic() - self.since
        return passed - max(0.0, waited_s(self.pid) - self.waited_before_s)  # an ended process tells 0

    def is_over_its_limit(self) -> bool:
        return self.scoring is not None and self.scoring_s() > self.scoring.limit_s

    async def answer(self) -> dict[str, Any]:
        """Reads the answer to the call being scored. Its `more` is true if another answer follows."""
        answer: dict[str, Any] = json.loads(await self.read())
        return answer
