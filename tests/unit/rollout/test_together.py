"""What is awaited together ends together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from megarl.rollout import sampling_seeds
from megarl.rollout import together as module
from megarl.rollout.api import InferenceEngine
from megarl.rollout.executor import WorkflowError, run_episode
from megarl.rollout.together import together
from megarl.types import GenerationHyperparameters, ModelRequest


async def number(value: int) -> int:
    await asyncio.sleep(0.001 * (3 - value))
    return value


def test_results_come_in_order() -> None:
    assert asyncio.run(together(number(value) for value in range(4))) == [0, 1, 2, 3]


def test_nothing_awaited_is_nothing_returned() -> None:
    assert asyncio.run(together(number(value) for value in ())) == []


def test_a_limit_of_time_counts_for_one_that_does_not_end_when_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while the others of a failed one are waited for."""

    monkeypatch.setattr(module, "GRACE_S", 0.1)

    async def stubborn() -> int:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return await released.wait()

    async def fails() -> int:
        await begun.wait()
        raise ValueError("the other")

    async def both() -> None:
        for parts in ([stubborn()], [stubborn(), fails()]):
            begun.clear()
            with pytest.raises((TimeoutError, ValueError)):
                async with asyncio.timeout(1.0):
                    await together(parts)
        released.set()

    begun, released = asyncio.Event(), asyncio.Event()
    asyncio.run(asyncio.wait_for(both(), 300))


def test_a_failure_that_is_caught_leaves_no_mark_on_the_task_and_keeps_its_context() -> None:
    async def fails() -> int:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    async def caught() -> None:
        with pytest.raises(ValueError, match="second") as error:
            await together([fails(), asyncio.sleep(3600, 1)])
        assert isinstance(error.value.__context__, KeyError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(caught())


class Asks(InferenceEngine):
    """Answers no request; the second fails once all have come."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0

    async def agenerate(self, req: ModelRequest) -> Any:
        self.begun += 1
        is_second = self.begun == 2
        while self.begun < 4:
            await asyncio.sleep(0)
        if is_second:
            raise ConnectionError("the server is gone")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def set_version(self, version: int) -> None:
        raise NotImplementedError

    def get_version(self) -> int:
        return 0

    def rollout_batch(self, data: Any, workflow: Any) -> Any:
        raise NotImplementedError


REQUEST = ModelRequest(input_ids=[1], gconfig=GenerationHyperparameters(n_samples=4))


class OneRequest:
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        return await engine.agenerate(REQUEST)


@pytest.mark.parametrize("what", ["a group", "runs of a prompt", "conversations"])
def test_a_failure_leaves_no_request_behind(what: str) -> None:
    """The prompt is given out again then, and would have its requests twice."""

    async def ask() -> None:
        workflow: Any = OneRequest()
        if what == "a group":
            await engine.agenerate_group(REQUEST)
        elif what == "runs of a prompt":
            await run_episode(engine, 0, {}, workflow, 4)
        else:
            await sampling_seeds.gather_apart(engine.agenerate(REQUEST) for _ in range(4))

    async def fail() -> int:
        with pytest.raises((ConnectionError, WorkflowError), match="the server is gone"):
            await ask()
        return engine.cancelled

    engine = Asks()
    assert asyncio.run(fail()) == 3
