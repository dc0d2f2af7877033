"""Processes of environments: one for each episode under way, reused after an episode without a fault.

    workflow --reset, step--> EnvironmentPool --JSON--> a process of megarl.forks that holds one environment

A call that takes too long, a crash, an exception or an impossible answer ends the process and costs its episode alone.
A process that ends closes its environment (`ending.py`), while episodes go on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import math
import pickle
import socket
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.environments.base import Message, Step
from megarl.environments.config import EnvironmentConfig
from megarl.environments.ending import Ends
from megarl.environments.host import Host
from megarl.forks import ForkedProcess, ForkError, ForkServer, StartError, receive, send
from megarl.knobs import UserError
from megarl.types import RewardError

ROLES = ("system", "user", "assistant", "tool")
JSON_BYTES_PER_CHAR = 12  # \ud83d\ude00


class EnvironmentFault(RewardError):
    """An environment failed: its episode is lost. `cause` is a short name, for counting."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class EnvironmentPool:
    """Starts environments of one configuration and lends them to episodes. A context manager.

    The constructor starts one environment, so that one that cannot start is refused. Use the pool from one asyncio
    loop. Linux ends the processes with the thread that creates the pool.

    Raises:
        UserError: the environment cannot start.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        config.check()
        self.config = config
        self.lost: collections.Counter[str] = collections.Counter()  # episodes, by cause
        self.first: dict[str, str] = {}  # first message of each cause
        self.episodes = 0
        self._idle: list[_Process] = []
        self._live: set[_Process] = set()
        self._room = asyncio.Semaphore(config.max_processes)
        what = f"the environment {config.kind} cannot start"
        interpreter = config.interpreter()
        self._ends = Ends(config.kind, config.close_limit_s)
        self._ending = ThreadPoolExecutor(config.max_processes, "megarl-environment-end")
        served = pickle.dumps(Host(config.kind, config.options(), self._ends.failures))
        try:
            self._server = ForkServer("megarl.environments.host", served, config.memory_limit_mb, interpreter)
        except (StartError, ForkError) as error:
            self._ends.close()
            raise UserError(f"{what}: {error}") from error
        try:
            self.tools = self._try()
        except BaseException as error:
            self._server.close()
            self._ends.close()
            if isinstance(error, ForkError | OSError | StartError):
                raise UserError(f"{what}: {error}") from error
            raise

    def _try(self) -> list[dict[str, Any]]:
        """Starts one environment and ends it; returns the schemas of its tools.

        Raises:
            StartError: it fails, dies or takes too long.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                pid = self._server.fork(theirs)
            ours.settimeout(self.config.start_limit_s)
            try:
                send(ours, b'{"call": "start"}')
                message = receive(ours)
            except TimeoutError:
                limit = f"rollout.environment.start_limit_s={self.config.start_limit_s:g}"
                raise StartError(f"it did not start within {limit}") from None
        if message is None:
            raise StartError("its process died; see its output above, or raise rollout.environment.memory_limit_mb")
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise StartError(answer["error"])
        self._ends.all_of([pid])
        return list(answer["tools"])

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes, after their environments are closed."""
        self._ending.shutdown()
        self._ends.all_of([process.pid for process in self._live])
        for process in self._live:
            process.kill()
        self._live.clear()
        self._idle.clear()
        self._server.close()
        self._ends.close()

    def report(self) -> str:
        """One line: how many episodes were lost, and why; empty if none was."""
        if not self.lost:
            return ""
        causes = "; ".join(
            f"{count} {cause}, the first: {self.first[cause]}" for cause, count in self.lost.most_common()
        )
        return f"{self.lost.total()} of {self.episodes} episodes were lost in the environment: {causes}"

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[Playing]:
        """Lends an environment for one episode, once there is room.

        An `EnvironmentFault` is counted. After any exception the process is ended, else it is used again. The episode
        does not wait for the end, but holds its place until then.
        """
        await self._room.acquire()
        self.episodes += 1
        process: _Process | None = None
        try:
            process = self._take() or await self._start()
            yield Playing(process, self.config)
        except BaseException as error:
            if isinstance(error, EnvironmentFault):
                self.lost[error.cause] += 1
                self.first.setdefault(error.cause, str(error))
            self._end(process)
            raise
        else:
            self._idle.append(process)
            self._room.release()

    def _take(self) -> _Process | None:
        """An idle process that did not die since its last episode, if there is one."""
        while self._idle:
            process = self._idle.pop()
            if not process.reader.at_eof():
                return process
            self._live.discard(process)
            process.kill()
        return None

    async def _start(self) -> _Process:
        try:
            process: _Process = await _Process.connect(self._server)
        except (OSError, ForkError) as error:
            raise EnvironmentFault(f"no process could be started: {error}", "died") from error
        self._live.add(process)
        return process

    def _end(self, process: _Process | None) -> None:
        """Ends a process, beside the episodes that go on; then another may take its place."""
        if process is None:
            self._room.release()
            return
        ended = process.loop.run_in_executor(self._ending, self._ends.all_of, [process.pid])

        def free(_: asyncio.Future[None]) -> None:
            process.writer.transport.abort()  # not earlier: a process that ends itself leaves its children
            self._live.discard(process)
            self._room.release()

        ended.add_done_callback(free)


class _Process(ForkedProcess):
    """A process that holds an environment."""


class Playing:
    """One episode in a lent environment. Every method raises `EnvironmentFault`, after which it is over."""

    def __init__(self, process: ForkedProcess, config: EnvironmentConfig) -> None:
        self._process = process
        self._config = config

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Begins the episode; returns the messages of its prompt."""
        observation = (await self._call("reset", row=dict(row)))["observation"]
        messages = [dict(message) for message in row.get("messages") or ()]
        if isinstance(observation, str) and messages:
            last = messages[-1]
            messages[-1] = {**last, "content": "\n\n".join(part for part in (last["content"], observation) if part)}
            self._checked(observation)
        elif observation is not None:
            messages = self._checked(observation)
        if not messages:
            raise EnvironmentFault("reset() gave no prompt, and the row has no messages", "lied")
        return messages

    async def step(self, answer: str) -> Step:
        """Acts by an answer."""
        told = await self._call("step", answer=answer)
        reward, done = self._number(told["reward"]), told["done"]
        observation = None if done or told["observation"] is None else self._checked(told["observation"])
        if not done and not observation:
            raise EnvironmentFault("step() gave no observation, but the episode is not done", "lied")
        return Step(observation, reward, done)

    async def end(self) -> float | None:
        """Reward of an episode that ends before it is done."""
        return self._number((await self._call("end"))["reward"])

    def _number(self, reward: Any) -> float | None:
        if reward is not None and not (isinstance(reward, float) and math.isfinite(reward)):
            raise EnvironmentFault(f"the reward is {reward!r}, which is no finite number", "lied")
        return reward

    def _checked(self, observation: Any) -> list[Message]:
        """An observation as messages.

        Raises:
            EnvironmentFault: it has another form, or too many characters.
        """
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if role not in ROLES or not isinstance(content, str) or len(message) != 2:
                raise EnvironmentFault(
                    f"the observation holds {str(message)[:200]}; a message has a role of {', '.join(ROLES)}, a "
                    "content of text, and nothing else",
                    "lied",
                )
            if any("\ud800" <= character <= "\udfff" for character in content):
                raise EnvironmentFault("the observation holds half of a surrogate pair, which is no text", "lied")
        characters, limit = sum(len(message["content"]) for message in messages), self._config.max_observation_chars
        if characters > limit:
            raise EnvironmentFault(
                f"the observation has {characters} characters, more than "
                f"rollout.environment.max_observation_chars={limit}",
                "lied",
            )
        return list(messages)

    async def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        limit_s = self._config.time_limit_s
        max_bytes = JSON_BYTES_PER_CHAR * self._config.max_observation_chars + 2**16
        try:
            async with asyncio.timeout(limit_s):
                self._process.write(json.dumps({"call": name, **arguments}, default=str).encode())
                answer: Any = json.loads(await self._process.read(max_bytes))
            if not isinstance(answer, dict):
                raise ValueError(f"{answer!r}"[:200])
        except TimeoutError:
            knob = f"rollout.environment.time_limit_s={limit_s:g}"
            raise EnvironmentFault(f"{name}() took longer than {knob}", "slow") from None
        except OverflowError as error:
            knob = f"rollout.environment.max_observation_chars={self._config.max_observation_chars}"
            raise EnvironmentFault(f"{name}() answered {error} bytes, more than {knob} can have", "lied") from None
        except (OSError, asyncio.IncompleteReadError):
            raise EnvironmentFault(f"its process died in {name}() (exit, crash or memory limit)", "died") from None
        except (ValueError, RecursionError) as error:
            raise EnvironmentFault(f"{name}() wrote into its pool's connection: {error}", "lied") from None
        if "error" in answer:
            raise EnvironmentFault(f"{name}() failed, {answer['error']}", "failed")
        return dict(answer)
