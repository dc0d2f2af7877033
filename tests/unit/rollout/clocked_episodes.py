"""Episodes under a clock of the test's own: each ends when and as the test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import torch

from megarl.rollout.api import GenerationError, InferenceEngine, RolloutWorkflow
from megarl.rollout.bounded_staleness import RolloutStream, StreamLimits
from megarl.rollout.executor import LoopThread
from megarl.types import Episode, ModelRequest, ModelResponse


class Loader:
    """Lists of `batch_size` numbered prompts, `size` in an epoch, with a state."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size, self.at = size, batch_size, 0

    def __iter__(self) -> Iterator[list[dict[str, int]]]:
        while self.at < self.size:
            start, self.at = self.at, min(self.at + self.batch_size, self.size)
            yield [{"row": row} for row in range(start, self.at)]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Engine(InferenceEngine):
    """Knows the trainer's version and the servers', and nothing else."""

    def __init__(self, version: int = 0) -> None:
        self.version = self.served = version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        raise NotImplementedError

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version

    def rollout_batch(self, data: Any, workflow: Any) -> Any:
        raise NotImplementedError


class Clocked(RolloutWorkflow):
    """Every episode waits until the test lets it end, in a way that the test chooses."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: dict[int, asyncio.Future[Any]] = {}
        self.begun: list[int] = []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        number = int(data["prompt_id"])
        version = self.engine.served
        self.begun.append(number)
        self.open[number] = asyncio.get_running_loop().create_future()
        try:
            outcome = await self.open[number]
        finally:
            del self.open[number]
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is None:
            return None
        return {
            "input_ids": torch.tensor([[1, data["row"]]]),
            "attention_mask": torch.ones(1, 2),
            "loss_mask": torch.tensor([[0, 1]]),
            "versions": torch.tensor([[-1, version]]),
            "rewards": torch.tensor([float(outcome)]),
        }


def begin(
    thread: LoopThread, engine: Engine, staleness: int, batch_size: int, state: Any = None, **options: Any
) -> tuple[RolloutStream, Clocked]:
    workflow = Clocked(engine)
    limits = StreamLimits(staleness, options.pop("timeout_s", 600.0), 2, options.pop("max_failures", 1000))
    loader = Loader(options.pop("size", 10_000), batch_size)
    stream = RolloutStream(engine, thread, loader, workflow, limits, batch_size=batch_size, **options)
    if state is not None:
        stream.load_state_dict(state)
    return stream, workflow


def step(
    thread: LoopThread, stream: RolloutStream, workflow: Clocked, rng: random.Random, odds: tuple[float, ...]
) -> list[Episode]:
    """One batch, while episodes end in a random order: well, rejected, with a failed server, or with an error.

    Servers that are behind the trainer get its version when nothing is under way any more.
    """

    async def drive() -> list[Episode]:
        batch = asyncio.ensure_future(stream._next_batch())
        while not batch.done():
            await asyncio.sleep(0)
            if not workflow.open and not batch.done() and workflow.engine.served < workflow.engine.version:
                workflow.engine.served = workflow.engine.version
                await stream._advance(workflow.engine.version, is_served=True)
            if workflow.open and not batch.done():
                number = rng.choice(sorted(workflow.open))
                outcome = rng.choices([1.0, None, GenerationError("lost"), ValueError("odd")], odds)[0]
                if not workflow.open[number].done():
                    workflow.open[number].set_result(outcome)
                await asyncio.sleep(0)
        return await batch

    return thread.run(drive(), 300.0, "a step")


def ends(thread: LoopThread, workflow: Clocked, number: int, outcome: Any) -> None:
    """Lets an episode end, and waits until the stream has seen it."""

    async def end() -> None:
        begun = len(workflow.begun)
        workflow.open[number].set_result(outcome)
        while number in workflow.open and len(workflow.begun) == begun:
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0)

    thread.run(end(), 300.0, "an episode's end")


def await_start(thread: LoopThread, stream: RolloutStream) -> None:
    """Waits until the episodes that the stream has under way have begun."""

    async def begun() -> None:
        while not stream._under_way.keys() <= stream.workflow.open.keys():  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)

    thread.run(begun(), 300.0, "the start of episodes")


def started(thread: LoopThread, stream: RolloutStream) -> Any:
    """Begins to wait for a batch, with its episodes started."""
    batch = thread.submit(stream._next_batch())
    await_start(thread, stream)
    return batch
