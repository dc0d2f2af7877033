"""Runs reward functions in supervised processes. A hang, a crash or too much memory costs one sample only.

    concurrent calls --> shares for idle workers, or for new ones if all are stuck --> value or RewardError
                             |
                             +-- no answer within time_limit_s: the worker is killed, others take the rest of its share

A worker answers call by call, and returns the rest of a share that takes long.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from megarl.knobs import MAX_SECONDS, MAX_WEIGHT, UserError, check_ranges, knob
from megarl.rewards import worker
from megarl.types import Reward, RewardError

PATIENCE_S = 0.1  # a call waits this long for a worker, or behind a slow one, before another worker takes it
FORK_DEADLINE_S = 30.0
START_DEADLINE_S = 120.0  # includes the import of the reward functions


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
        10.0, "seconds to score one completion; after that its sample is masked and counted", above=0, most=MAX_SECONDS
    )
    memory_limit_mb: int = knob(4096, "address space of a scoring process, in MiB", least=64, most=2**24)
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
    fails. The functions have the signature of `RLVRWorkflow`'s rewards, and are sync or async:
    `(prompt, completions, prompt_ids, completion_ids, **data) -> float`.

    A context manager. Linux ends the processes with the thread that creates the pool, so that thread must live as long
    as the pool. Use it from one asyncio loop.

    Raises:
        UserError: the functions cannot be loaded in another process.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], config: RewardConfig | None = None) -> None:
        self.config = config or RewardConfig()
        self.weights = self.config.weights or [1.0] * len(functions)
        self.failures: collections.Counter[str] = collections.Counter()  # by cause
        self._idle: collections.deque[_Worker] = collections.deque()
        self._live: set[_Worker] = set()
        self._queue: collections.deque[_Call] = collections.deque()  # calls without a worker
        self._forking = 0
        self._answers = 0
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()  # of the control socket
        self._control, child_end = socket.socketpair()
        self._process = self._spawn(child_end)
        self._load(functions)

    def _spawn(self, child_end: socket.socket) -> subprocess.Popen[bytes]:
        """Starts the process that will hold the reward functions, connected by `child_end`."""
        memory = str(self.config.memory_limit_mb * 2**20)
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rewards.worker", str(child_end.fileno()), memory],
            pass_fds=[child_end.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        child_end.close()
        return process

    def _load(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Sends the functions to the process and waits until it has loaded them."""
        try:
            self._control.settimeout(START_DEADLINE_S)
            worker.send(self._control, pickle.dumps((sys.path, cloudpickle.dumps(list(functions)))))
            answer = self._answer()
            if "error" in answer:
                raise UserError(f"the reward functions cannot be loaded in another process: {answer['error']}")
            self._control.settimeout(FORK_DEADLINE_S)
        except BaseException:
            self.close()
            raise

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
        self._control.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(FORK_DEADLINE_S)

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> Reward:
        values = await self.score(prompt, completions, prompt_ids, completion_ids, **data)
        return Reward(sum(weight * value for weight, value in zip(self.weights, values, strict=True)), values)

    async def score(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> list[float]:
        """The value of every function for one completion.

        Raises:
            RewardError: the call took too long, its process died, or a function raised or returned no finite number.
        """
        pickled = pickle.dumps({"args": (prompt, completions, prompt_ids, completion_ids), "data": data})
        loop = asyncio.get_running_loop()
        call = _Call(pickled, loop.create_future())
        self._queue.append(call)
        if len(self._queue) == 1:
            loop.call_soon(self._hand_out)  # later, together with all calls of this loop iteration
        try:
            return await call.values
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
                    self._fail(call, "time", f"no answer within rewards.time_limit_s={self.config.time_limit_s:g}")
                else:
                    self._fail(call, "died", "its process died (exit, crash or memory limit)")
                self._end(worker_)
                break
            self._answers += 1
            if "error" in answer:
                self._fail(call, "raised", answer["error"])
            elif not call.values.done():  # the caller may have been cancelled
                call.values.set_result(answer["values"])
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

    def _fail(self, call: _Call, cause: str, message: str) -> None:
        if not call.values.done():  # otherwise the caller was cancelled
            self.failures[cause] += 1
            call.values.set_exception(RewardError(message))

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
            for busy in [busy for busy in self._live if busy.scoring is not None]:
                elapsed = time.monotonic() - busy.since
                if elapsed > self.config.time_limit_s:
                    busy.late = True
                    self._end(busy)
                elif elapsed > PATIENCE_S:
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
            new_worker = await _Worker.connect(self._request_fork)
        except (OSError, RewardError) as error:
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

    def _request_fork(self, child_end: socket.socket) -> int:
        """Requests a worker on this end of a socket pair, and returns its pid."""
        with self._lock:
            socket.send_fds(self._control, [b"."], [child_end.fileno()])
            return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        """Reads the next answer of the process that holds the functions."""
        try:
            message = worker.receive(self._control)
        except TimeoutError:
            message = None
        if message is None:
            raise RewardError("the process that holds the reward functions did not answer; see its output above")
        answer: dict[str, Any] = json.loads(message)
        return answer


@dataclass(eq=False)
class _Call:
    pickled: bytes
    values: asyncio.Future[list[float]]


class _Worker:
    """A scoring process and the streams to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self.loop = asyncio.get_running_loop()
        self.share: collections.deque[_Call] = collections.deque()  # calls not begun
        self.scoring: _Call | None = None
        self.since = 0.0  # start time of `scoring`
        self.late = False

    @staticmethod
    async def connect(fork: Callable[[socket.socket], int]) -> _Worker:
        """Creates a worker: `fork` starts the process on one end of a socket pair and returns its pid."""
        parent_end, child_end = socket.socketpair()
        with child_end:
            pid = await asyncio.to_thread(fork, child_end)
        parent_end.setblocking(False)
        return _Worker(pid, *await asyncio.open_unix_connection(sock=parent_end))

    def send(self, share: list[_Call]) -> None:
        """Sends a share of calls to the process."""
        self.share.extend(share)
        message = pickle.dumps([call.pickled for call in share])
        self.writer.write(worker.HEADER.pack(len(message)) + message)

    def next(self) -> _Call:
        """Takes the next call of the share as the one being scored."""
        self.scoring = self.share.popleft()
        self.since = time.monotonic()
        return self.scoring

    async def answer(self) -> dict[str, Any]:
        """Reads the answer to the call being scored. Its `more` is true if another answer follows."""
        (size,) = worker.HEADER.unpack(await self.reader.readexactly(worker.HEADER.size))
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.kill(self.pid, signal.SIGKILL)
        if not self.loop.is_closed():
            self.writer.transport.abort()
