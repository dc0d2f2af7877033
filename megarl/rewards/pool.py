"""Reward functions in supervised processes: one that hangs, crashes or eats memory costs its own sample and no other.

calls made together --> shared out over idle workers, or new ones where all are stuck --> value, or RewardError
                             |
                             +-- no answer within time_limit_s: killed, another takes its place and what is left

A worker answers call by call, and hands back the rest of a share that takes long.
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

from megarl.knobs import UserError, knob
from megarl.rewards import worker
from megarl.types import Reward, RewardError

PATIENCE_S = 0.1  # calls wait this long for a worker, or behind a slow one, before others take them
FORK_DEADLINE_S = 30.0
START_DEADLINE_S = 120.0  # importing the reward functions


@dataclass(frozen=True)
class RewardConfig:
    """How completions are scored."""

    functions: list[str] = knob(
        factory=lambda: ["gsm8k"], meaning="reward functions: names of megarl.rewards, or MODULE.FUNCTION of your own"
    )
    weights: list[float] = knob(factory=list, meaning="weight of each function in the reward; empty: 1 for all")
    time_limit_s: float = knob(10.0, "seconds to score one completion; beyond, its sample is masked and counted")
    memory_limit_mb: int = knob(4096, "address space of a process that scores, in MiB")
    workers: int = knob(2, "processes that score while none of them hangs")
    max_workers: int = knob(64, "most processes that score at once, where some hang or are slow")

    def __post_init__(self) -> None:
        if not self.functions:
            raise UserError("rewards.functions is empty; name one at least, such as gsm8k")
        if self.weights and len(self.weights) != len(self.functions):
            raise UserError(
                f"rewards.weights has {len(self.weights)} values and rewards.functions {len(self.functions)}; give one "
                "weight a function, or none"
            )
        if not self.time_limit_s > 0:
            raise UserError(f"rewards.time_limit_s={self.time_limit_s} must be above 0")
        if self.memory_limit_mb < 64:
            raise UserError(f"rewards.memory_limit_mb={self.memory_limit_mb} must be at least 64")
        if not 1 <= self.workers <= self.max_workers:
            raise UserError(
                f"rewards.workers={self.workers} must lie between 1 and rewards.max_workers={self.max_workers}"
            )


class RewardPool:
    """Scores completions with `functions` in processes of its own; itself a reward function, async.

    `await pool(prompt, completions, prompt_ids, completion_ids, **data)` gives the weighted sum, with the functions'
    values in its `parts`; `await pool.score(...)` gives those alone. Both raise `RewardError` where a function failed.
    The functions are those of `RLVRWorkflow`: `(prompt, completions, prompt_ids, completion_ids, **data) -> float`,
    sync or async. A context manager, made in a thread that lives as long as it; used from one asyncio loop.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], config: RewardConfig | None = None) -> None:
        self.config = config or RewardConfig()
        self.weights = self.config.weights or [1.0] * len(functions)
        self.failures: collections.Counter[str] = collections.Counter()  # by cause
        self._idle: collections.deque[_Worker] = collections.deque()
        self._live: set[_Worker] = set()
        self._queue: collections.deque[_Call] = collections.deque()  # no worker has them yet
        self._forking = 0
        self._answers = 0
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()  # of the control socket
        self._start(functions)

    def _start(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._control, theirs = socket.socketpair()
        memory = str(self.config.memory_limit_mb * 2**20)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rewards.worker", str(theirs.fileno()), memory],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        try:
            self._control.settimeout(START_DEADLINE_S)
            worker.send(self._control, pickle.dumps((sys.path, cloudpickle.dumps(list(functions)))))
            answer = self._answer()
            if "error" in answer:
                raise UserError(f"the reward functions cannot be loaded in a process of their own: {answer['error']}")
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
        for each in list(self._live):
            each.kill()
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
            loop.call_soon(self._hand_out)  # with all other calls that are made in this turn of the loop
        try:
            return await call.values
        except asyncio.CancelledError:
            for each in [each for each in self._live if each.scoring is call]:
                self._end(each)
            raise

    def _hand_out(self) -> None:
        """Shares the calls that wait out over the idle workers. Where there are none, more are made."""
        while self._queue and self._idle:
            count = -(-len(self._queue) // len(self._idle))
            self._begin(self._work(self._idle.pop(), [self._queue.popleft() for _ in range(count)]))
        self._grow(self.config.workers - len(self._live) - self._forking)
        if self._watch is None or self._watch.done():
            self._watch = self._begin(self._watch_over())

    async def _work(self, worker_: _Worker, share: list[_Call]) -> None:
        """Has a worker score a share, one call after the other. What it does not get to goes back to the queue."""
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
            elif not call.values.done():  # its caller may have been cancelled
                call.values.set_result(answer["values"])
            if not answer["more"]:
                break
            if not worker_.share:  # it goes on with calls that others have taken meanwhile
                self._end(worker_)
        worker_.scoring = None
        self._take_back(worker_)
        self._free(worker_)

    def _take_back(self, worker_: _Worker) -> None:
        """Lets others have what a worker has not begun."""
        self._queue.extendleft(reversed(worker_.share))
        worker_.share.clear()

    def _fail(self, call: _Call, cause: str, says: str) -> None:
        if not call.values.done():  # else its caller was cancelled
            self.failures[cause] += 1
            call.values.set_exception(RewardError(says))

    def _free(self, worker_: _Worker) -> None:
        """A worker is done with its share, or has ended. Once nothing is left to do, those that are too many end."""
        if worker_ in self._live:
            self._idle.append(worker_)
        if self._queue:
            self._hand_out()
        while len(self._idle) == len(self._live) > self.config.workers:
            self._end(self._idle.pop())

    async def _watch_over(self) -> None:
        """While there is work: ends workers that are late, has others do what waits behind slow ones, and doubles the
        workers, up to the most, where calls wait and none is answered."""
        while self._queue or len(self._idle) < len(self._live):
            seen = self._answers
            await asyncio.sleep(min(PATIENCE_S, self.config.time_limit_s))
            for each in [each for each in self._live if each.scoring is not None]:
                waited = time.monotonic() - each.since
                if waited > self.config.time_limit_s:
                    each.late = True
                    self._end(each)
                elif waited > PATIENCE_S:
                    self._take_back(each)
            if self._queue and self._idle:
                self._hand_out()
            elif self._answers == seen and self._forking == 0:
                self._grow(max(len(self._live), 1))

    def _grow(self, count: int) -> None:
        room = self.config.max_workers - len(self._live) - self._forking
        for _ in range(min(count, room, len(self._queue))):
            self._forking += 1
            self._begin(self._fork())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fork(self) -> None:
        try:
            made = await _Worker.made_by(self._forked)
        except (OSError, RewardError) as error:
            self._forking -= 1
            if self._queue:
                self._fail(self._queue.popleft(), "died", f"no process could be made to score it: {error}")
        else:
            self._forking -= 1
            self._live.add(made)
            self._free(made)

    def _end(self, worker_: _Worker) -> None:
        worker_.kill()
        self._live.discard(worker_)

    def _forked(self, theirs: socket.socket) -> int:
        """Has a worker forked on this end of a socket pair; its pid."""
        with self._lock:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
            return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        try:
            message = worker.receive(self._control)
        except TimeoutError:
            message = None
        if message is None:
            raise RewardError("the process that holds the reward functions did not answer; see its lines above")
        answer: dict[str, Any] = json.loads(message)
        return answer


@dataclass(eq=False)
class _Call:
    pickled: bytes
    values: asyncio.Future[list[float]]


class _Worker:
    """A process that scores, and the streams to it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self.loop = asyncio.get_running_loop()
        self.share: collections.deque[_Call] = collections.deque()  # not begun
        self.scoring: _Call | None = None
        self.since = 0.0  # when it began with that
        self.late = False

    @staticmethod
    async def made_by(fork: Callable[[socket.socket], int]) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            pid = await asyncio.to_thread(fork, theirs)
        ours.setblocking(False)
        return _Worker(pid, *await asyncio.open_unix_connection(sock=ours))

    def send(self, share: list[_Call]) -> None:
        self.share.extend(share)
        message = pickle.dumps([call.pickled for call in share])
        self.writer.write(worker.HEADER.pack(len(message)) + message)

    def next(self) -> _Call:
        """The call that it scores now."""
        self.scoring = self.share.popleft()
        self.since = time.monotonic()
        return self.scoring

    async def answer(self) -> dict[str, Any]:
        """To the next call of the share; `more` says whether another one follows."""
        (size,) = worker.HEADER.unpack(await self.reader.readexactly(worker.HEADER.size))
        answer: dict[str, Any] = json.loads(await self.reader.readexactly(size))
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have died by itself
            os.kill(self.pid, signal.SIGKILL)
        if not self.loop.is_closed():
            self.writer.transport.abort()
