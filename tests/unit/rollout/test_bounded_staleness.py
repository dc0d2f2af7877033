"""The stream of rollouts under a clock of the test's own: nothing lost, nothing twice, nothing older than allowed."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.knobs import UserError
from megarl.rollout import bounded_staleness
from megarl.rollout.api import GenerationError, InferenceEngine, RequestRefused, RolloutWorkflow
from megarl.rollout.bounded_staleness import RolloutStream, StreamLimits
from megarl.rollout.executor import LoopThread, WorkflowError
from megarl.types import ORIGIN, Episode, ModelRequest, ModelResponse
from tests.clocks import put_forward


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


LIMITS = StreamLimits(max_head_offpolicyness=1, episode_timeout_s=600.0, max_requeues=2, max_failures=3)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-stream")
    yield thread
    thread.stop()


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


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    staleness=st.integers(0, 3),
    batch_size=st.integers(1, 5),
    rejects=st.sampled_from([0.0, 0.3]),
    faults=st.sampled_from([0.0, 0.3]),
    beside=st.sampled_from([0.0, 0.7]),
)
def test_every_prompt_is_trained_on_or_rejected_once_and_none_is_too_old(
    thread: LoopThread, seed: int, staleness: int, batch_size: int, rejects: float, faults: float, beside: float
) -> None:
    """`beside` is the share of batches that are asked for while the servers receive the version."""
    rng = random.Random(seed)
    engine = Engine()
    stream, workflow = begin(thread, engine, staleness, batch_size)
    trained: list[int] = []
    rejected: list[int] = []
    restarts_at = set(rng.sample(range(1, 15), 3))
    for version in range(1, 16):
        episodes = step(thread, stream, workflow, rng, (1.0, rejects, faults, faults / 3))
        for episode in episodes:
            if episode.group is None:
                assert episode.reason
                rejected.append(int(episode.prompt_id))
                continue
            trained.append(int(episode.prompt_id))
            assert episode.group["input_ids"][1] == int(episode.prompt_id)  # the prompt's own row
            assert engine.version - int(episode.group["versions"][1]) <= staleness
        assert sum(episode.group is not None for episode in episodes) == batch_size
        if engine.served < engine.version:
            engine.served = engine.version
            stream.set_version(engine.version)
            assert len(workflow.open) + len(stream._finished) <= staleness * batch_size
        engine.version = version
        if rng.random() < beside:
            stream.expect_version(version)
        else:
            engine.served = version
            stream.set_version(version)
        assert len(workflow.open) <= (staleness + 1) * batch_size
        if version in restarts_at:  # the run is killed; what it saved goes on elsewhere
            state = stream.state_dict()
            thread.cancel_all()
            engine.served = engine.version
            stream, workflow = begin(thread, engine, staleness, batch_size, state)
    state = stream.state_dict()
    waiting = [entry["number"] for entry in state["waiting"]]
    since = [int(e.prompt_id) for e in stream._rejected]
    assert sorted([*trained, *rejected, *waiting, *since]) == list(range(state["read"]))
    thread.cancel_all()


def test_the_rate_of_sampling_counts_the_time_in_which_episodes_are_under_way(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("megarl.rollout.bounded_staleness.time.perf_counter", lambda: now)
    engine = Engine()
    stream, workflow = begin(thread, engine, staleness=0, batch_size=2)

    async def one_batch(seconds: float) -> None:
        nonlocal now
        batch = asyncio.ensure_future(stream._next_batch())
        while len(workflow.open) < 2:
            await asyncio.sleep(0)
        now += seconds
        for waiting in list(workflow.open.values()):
            waiting.set_result(1.0)
        await batch

    for seconds in (4.0, 0.5):
        thread.run(one_batch(seconds), 300.0, "a batch")
        assert stream.sampled == (2, seconds)  # an episode has one trained token
        now += 100.0  # training, while nothing may be sampled
        engine.version += 1
        stream.set_version(engine.version)
    thread.cancel_all()


def test_without_staleness_a_batch_is_the_next_prompts_in_order(thread: LoopThread) -> None:
    engine = Engine()
    stream, workflow = begin(thread, engine, 0, 4, size=6)
    numbers = []
    for version in (1, 2, 3):
        numbers.append([int(e.prompt_id) for e in step(thread, stream, workflow, random.Random(version), (1, 0, 0, 0))])
        engine.version = version
        stream.set_version(version)
    assert numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]  # behind the last row comes the first again
    thread.cancel_all()


def test_episodes_go_on_while_the_trainer_trains(thread: LoopThread) -> None:
    engine = Engine()
    stream, workflow = begin(thread, engine, 1, 2)
    first = step(thread, stream, workflow, random.Random(0), (1, 0, 0, 0))
    assert len(first) == 2
    assert len(workflow.begun) == 4  # two more are under way, for the next batch
    thread.cancel_all()


def test_refused_groups_are_replaced_or_leave_the_batch_smaller(thread: LoopThread) -> None:
    for dynamic in (False, True):
        engine = Engine()
        stream, workflow = begin(
            thread, engine, 0, 4, should_accept=lambda g: int(g["input_ids"][1]) % 2 == 0, dynamic_bs=dynamic
        )
        episodes = step(thread, stream, workflow, random.Random(0), (1, 0, 0, 0))
        accepted = [int(e.prompt_id) for e in episodes if e.group is not None]
        refused = [(int(e.prompt_id), e.reason) for e in episodes if e.group is None]
        assert accepted == ([0, 2] if dynamic else [0, 2, 4, 6])
        assert all(number % 2 and reason == "refused by should_accept_fn" for number, reason in refused)
        thread.cancel_all()


def test_an_episode_out_of_time_is_rejected_with_its_time(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: thread.loop.time(), perf_counter=time.perf_counter)
    monkeypatch.setattr(bounded_staleness, "time", clock)
    engine = Engine()
    stream, workflow = begin(thread, engine, 0, 1, timeout_s=600.0)

    async def let_the_second_end() -> None:
        while 0 not in workflow.open:
            await asyncio.sleep(0.01)
        put_forward(thread.loop, 700.0)
        while 1 not in workflow.open:
            await asyncio.sleep(0.01)
        workflow.open[1].set_result(1.0)

    ending = thread.submit(let_the_second_end())
    episodes = stream.next_batch(300.0)
    ending.result(300)
    ((late, reason),) = [(e.prompt_id, e.reason) for e in episodes if e.group is None]
    assert late == "0"
    took = re.fullmatch(r"timed out after (\d+) s", reason)
    assert took is not None, reason
    assert int(took[1]) >= 700  # more on a busy machine
    thread.cancel_all()


@pytest.mark.parametrize(
    ("outcome", "raised", "says"),
    [
        (GenerationError("all gone", fatal=True), GenerationError, "all gone"),
        (UserError("the workflow returned a list"), UserError, "the workflow returned a list"),
        (RequestRefused("answered 400"), WorkflowError, "4 episodes failed in a row, the last: .*answered 400"),
        (ValueError("always"), WorkflowError, "4 episodes failed in a row, the last: .*always"),
        (GenerationError("lost"), WorkflowError, "4 episodes failed in a row, the last: .*lost"),
        (float("nan"), WorkflowError, "4 episodes failed in a row, the last: no sample .* rewards not finite"),
    ],
)
def test_what_cannot_go_on_stops_the_run_with_its_cause(
    thread: LoopThread, outcome: Any, raised: type[Exception], says: str
) -> None:
    engine = Engine()
    stream, workflow = begin(thread, engine, 0, 2, max_failures=3)

    async def drive() -> None:
        batch = asyncio.ensure_future(stream._next_batch())
        while not batch.done():
            await asyncio.sleep(0)
            for future in list(workflow.open.values()):
                if not future.done():
                    future.set_result(outcome)
        await batch

    with pytest.raises(raised, match=says):
        thread.run(drive(), 300.0, "a failing batch")
    thread.cancel_all()


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


def test_only_failures_in_a_row_stop_the_run(thread: LoopThread) -> None:
    engine = Engine()
    stream, workflow = begin(thread, engine, 0, 8, max_failures=2)
    batch = started(thread, stream)
    for outcome in (ValueError("a"), ValueError("b"), 1.0, ValueError("c"), ValueError("d"), None, ValueError("e")):
        ends(thread, workflow, min(workflow.open), outcome)
    assert not batch.done()
    ends(thread, workflow, min(workflow.open), ValueError("f"))
    assert not batch.done()
    ends(thread, workflow, min(workflow.open), ValueError("g"))
    with pytest.raises(WorkflowError, match=r"3 episodes failed in a row, the last: .*g"):
        batch.result(300)
    thread.cancel_all()


def test_a_requeued_prompt_runs_next_at_the_trainers_version_and_as_often_as_allowed(thread: LoopThread) -> None:
    engine = Engine()
    stream, workflow = begin(thread, engine, 1, 1, size=100)
    batch = started(thread, stream)
    assert workflow.begun == [0, 1]
    ends(thread, workflow, 0, 1.0)
    assert [e.prompt_id for e in batch.result(300)] == ["0"]
    engine.version = 1
    stream.set_version(1)
    await_start(thread, stream)
    assert workflow.begun == [0, 1, 2]
    batch = started(thread, stream)
    ends(thread, workflow, 1, GenerationError("lost"))  # begun at version 0
    assert workflow.begun == [0, 1, 2, 1]
    assert stream._under_way[1][0].version == 1
    ends(thread, workflow, 1, GenerationError("lost"))
    assert workflow.begun == [0, 1, 2, 1, 1]
    ends(thread, workflow, 1, GenerationError("lost"))  # max_requeues is 2: another prompt takes its place
    assert workflow.begun == [0, 1, 2, 1, 1, 3]
    ends(thread, workflow, 2, 1.0)
    assert [(e.prompt_id, e.group is None) for e in batch.result(300)] == [("2", False), ("1", True)]
    thread.cancel_all()


def test_a_requeued_prompt_goes_before_those_read_after_it(thread: LoopThread) -> None:
    """The loader reads 4 prompts at a time, so prompts wait in the queue when one is put back."""
    engine = Engine()
    stream, workflow = begin(thread, engine, 0, 2)
    stream.loader.batch_size = 4
    batch = started(thread, stream)
    assert workflow.begun == [0, 1]
    ends(thread, workflow, 0, GenerationError("lost"))
    assert workflow.begun == [0, 1, 0]
    ends(thread, workflow, 0, None)
    assert workflow.begun == [0, 1, 0, 2]
    for number in (1, 2):
        ends(thread, workflow, number, 1.0)
    assert [e.prompt_id for e in batch.result(300)] == ["1", "2", "0"]
    thread.cancel_all()


def test_a_batch_that_does_not_come_has_a_deadline(thread: LoopThread) -> None:
    stream, _ = begin(thread, Engine(), 0, 2)
    with pytest.raises(TimeoutError, match="a batch of 2 prompts under Clocked did not end within"):
        stream.next_batch(0.2)
    thread.cancel_all()


def test_a_loader_without_prompts_is_refused(thread: LoopThread) -> None:
    stream, _ = begin(thread, Engine(), 0, 2, size=0)
    with pytest.raises(UserError, match="no prompts"):
        stream.next_batch(300)
    thread.cancel_all()


def test_a_loader_that_fails_while_an_episode_is_replaced_stops_the_run(thread: LoopThread) -> None:
    class Breaks(Loader):
        def __iter__(self) -> Iterator[list[dict[str, int]]]:
            yield [{"row": 0}, {"row": 1}]
            raise UserError("source b: row 7 does not fit")

    engine = Engine()
    workflow = Clocked(engine)
    stream = RolloutStream(engine, thread, Breaks(9, 2), workflow, LIMITS, batch_size=2)
    stream.limits = StreamLimits(0, 600.0, 2, 3)
    batch = started(thread, stream)
    ends(thread, workflow, 0, None)  # rejected: another prompt is read in its place
    with pytest.raises(UserError, match="source b: row 7 does not fit"):
        batch.result(300)
    thread.cancel_all()


def test_the_origin_of_a_prompt_reaches_its_episode_and_no_workflow(thread: LoopThread) -> None:
    class WithOrigins(Loader):
        def __iter__(self) -> Iterator[list[dict[str, Any]]]:
            for rows in super().__iter__():
                yield [{**row, ORIGIN: {"source": "a", "row": row["row"]}} for row in rows]

    class Watching(Clocked):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            assert ORIGIN not in data
            return await super().arun_episode(engine, data)

    engine = Engine()
    workflow = Watching(engine)

    def begun() -> RolloutStream:
        limits = StreamLimits(0, 600.0, 2, 1000)
        odd = lambda g: int(g["input_ids"][1]) % 2 == 0  # noqa: E731
        return RolloutStream(engine, thread, WithOrigins(100, 2), workflow, limits, batch_size=2, should_accept=odd)

    stream = begun()
    episodes = step(thread, stream, workflow, random.Random(0), (1, 0, 0, 0))
    assert all(episode.origin == {"source": "a", "row": int(episode.prompt_id)} for episode in episodes)
    refused = [e for e in episodes if e.reason == "refused by should_accept_fn"]
    assert refused
    assert all(e.rewards == (1.0,) for e in refused)
    stream._rejected = refused
    again = begun()
    again.load_state_dict(stream.state_dict())
    assert again._rejected == [
        Episode(e.prompt_id, None, e.reason, origin=e.origin, rewards=e.rewards) for e in refused
    ]
    thread.cancel_all()
