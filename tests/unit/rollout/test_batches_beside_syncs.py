"""Batches that are taken at the trainer's version while the servers still receive it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fault_server import Server
from test_sglang_client import Asks, request
from test_withheld_answers import serves

from megarl.rollout.client.sglang_client import RemoteSGLangEngine
from megarl.rollout.executor import LoopThread
from megarl.rollout.routing import WeightsWanted
from megarl.types import Episode
from tests.unit.rollout.clocked_episodes import Engine, begin, step


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test-stream")
    yield thread
    thread.stop()


def test_no_prompt_starts_while_the_servers_receive_the_trainers_version(thread: LoopThread) -> None:
    engine = Engine()
    stream, workflow = begin(thread, engine, 1, 2)
    step(thread, stream, workflow, random.Random(0), (1, 0, 0, 0))
    engine.version = 1
    stream.expect_version(1)
    assert len(workflow.begun) == 4

    async def finish() -> list[Episode]:
        for episode in workflow.open.values():
            episode.set_result(1.0)
        return await stream._next_batch()

    assert len(thread.run(finish(), 300.0, "a batch of the prompts under way")) == 2
    assert len(workflow.begun) == 4
    for _ in range(2):  # told twice, there is no more room
        stream.set_version(1)
        assert set(stream._under_way) == {4, 5}
    thread.cancel_all()


def test_a_wait_beside_a_sync_ends_with_it_and_the_answers_that_it_withholds_come_later(
    start_server: Callable[..., Server], connect: Callable[..., RemoteSGLangEngine]
) -> None:
    engine = connect(start_server(serves("1")), batch_timeout_s=300.0)

    class Loader:
        batch_size = 1

        def __iter__(self) -> Any:
            return iter([[{"row": row}] for row in range(9)])

    loader, workflow = Loader(), Asks(request(5))
    engine.hold(1)
    ended = threading.Event()
    engine.expect_version(1, ended.is_set)
    threading.Timer(0.5, ended.set).start()
    with pytest.raises(WeightsWanted):
        engine.prepare_batch(loader, workflow)
    assert ended.is_set()
    engine.set_version(1)
    engine.release()
    engine.prepare_batch(loader, workflow)
    assert [episode.prompt_id for episode in engine.episodes] == ["0"]
