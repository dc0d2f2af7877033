"""A stream of rollouts ends at once with an error that none of its parts foresaw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megarl.rollout.bounded_staleness import RolloutStream, StreamLimits
from megarl.rollout.executor import LoopThread
from tests.unit.rollout.clocked_episodes import Clocked, Engine, Loader, ends, started


class Breaks(Loader):
    """Has two prompts; then the hub is gone."""

    def __iter__(self) -> Iterator[list[dict[str, int]]]:
        yield [{"row": 0}, {"row": 1}]
        raise RuntimeError("connection reset by the hub")


def refuses(group: Any) -> bool:
    raise KeyError("no column 'difficulty'")


@pytest.mark.parametrize(
    ("outcome", "raised", "says"),
    [(None, RuntimeError, "connection reset by the hub"), (1.0, KeyError, "difficulty")],
    ids=["loader", "filter"],
)
def test_an_error_of_a_loader_or_a_filter_ends_the_batch(outcome: Any, raised: type[Exception], says: str) -> None:
    """A rejected episode has another prompt read in its place; a group that came is given to the filter."""
    thread, engine = LoopThread("test-stream"), Engine()
    workflow = Clocked(engine)
    limits = StreamLimits(0, 60.0, 2, 3)
    stream = RolloutStream(engine, thread, Breaks(9, 2), workflow, limits, batch_size=2, should_accept=refuses)
    batch = started(thread, stream)
    ends(thread, workflow, 0, outcome)
    with pytest.raises(raised, match=says):
        batch.result(300)
    thread.stop()
