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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.knobs import UserError
from megarl.rollout import bounded_staleness
from megarl.rollout.api import GenerationError, InferenceEngine, RequestRefused
from megarl.rollout.bounded_staleness import RolloutStream, StreamLimits
from megarl.rollout.executor import LoopThread, WorkflowError
from megarl.types import ORIGIN, Episode
from tests.clocks import put_forward
from tests.unit.rollout.clocked_episodes import Clocked, Engine, Loader, await_start, begin, ends, started, step

LIMITS = StreamLimits(max_head_offpolicyness=1, episode_timeout_s=600.0, max_requeues=2, max_failures=3)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-stream")
    yield thread
    thread.stop()


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
