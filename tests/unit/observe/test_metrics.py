import asyncio
import math
import threading
import time

import pytest

from megarl.observe.metrics import StatsTracker, stats_tracker
from megarl.observe.timers import StageTimes, clock


def test_scalars_are_averaged_and_totals_summed_since_the_last_export():
    tracker = StatsTracker()
    tracker.scalar(loss=1.0)
    tracker.scalar(loss=3.0, grad_norm=0.5)
    tracker.total(tokens=10)
    tracker.total(tokens=32)
    assert tracker.export() == {"grad_norm": 0.5, "loss": 2.0, "tokens": 42.0}
    assert tracker.export() == {}
    tracker.scalar(loss=7.0)
    assert tracker.export() == {"loss": 7.0}


def test_a_rate_is_the_sum_of_amounts_over_the_sum_of_seconds():
    tracker = StatsTracker()
    tracker.rate(tokens_per_s=(100, 1.0))
    assert tracker.step() == {"tokens_per_s": 100.0}
    tracker.rate(tokens_per_s=(100, 3.0))
    assert tracker.step() == {"tokens_per_s": pytest.approx(100 / 3)}
    assert tracker.export() == {"tokens_per_s": 50.0}


def test_a_step_is_read_without_leaving_the_export():
    tracker = StatsTracker()
    for loss, tokens in ((1.0, 10), (3.0, 32)):
        tracker.scalar(loss=loss, staleness_max=loss)
        tracker.total(tokens=tokens)
        assert tracker.step() == {"tokens": tokens, "loss": loss, "staleness_max": loss}
    tracker.scalar(loss=8.0, staleness_max=2.0)
    assert tracker.export() == {"tokens": 42.0, "loss": 4.0, "staleness_max": 3.0}
    assert tracker.step() == tracker.export() == {}


def test_a_name_that_ends_in_max_keeps_the_largest_value_and_any_nan():
    tracker = StatsTracker()
    for value in (2.0, 5.0, 3.0):
        tracker.scalar(diff_max=value)
    assert tracker.export() == {"diff_max": 5.0}
    for value in (2.0, math.nan, 3.0):
        tracker.scalar(diff_max=value)
        tracker.step()
    assert math.isnan(tracker.export()["diff_max"])


def test_scopes_nest_and_close_again_after_an_error():
    tracker = StatsTracker()
    with tracker.scope("actor"):
        with pytest.raises(ValueError, match="could not convert"), tracker.scope("update"):
            tracker.scalar(loss=1.0, lr="fast")  # type: ignore[arg-type]
        tracker.scalar(lr=0.1)
    tracker.scalar(step=5)
    assert tracker.export() == {"actor/lr": 0.1, "actor/update/loss": 1.0, "step": 5.0}


def test_timing_adds_up_within_a_step_and_is_kept_when_the_block_raises():
    tracker, start = StatsTracker(), time.perf_counter()
    for _ in range(2):
        with tracker.record_timing("rollout"):
            threading.Event().wait(0.02)
    with pytest.raises(KeyError), tracker.scope("actor"), tracker.record_timing("forward"):
        raise KeyError("x")
    in_all, stats = time.perf_counter() - start, tracker.export()
    assert list(stats) == ["time_s/rollout", "time_s/actor/forward"]  # stages in the order they ran
    assert stats["time_s/rollout"] >= 0.04
    assert stats["time_s/actor/forward"] >= 0.0
    assert sum(stats.values()) <= in_all


def test_a_scope_belongs_to_its_thread_and_its_task_while_numbers_are_shared():
    tracker = StatsTracker()
    inside = threading.Barrier(2)

    def work(name: str) -> None:
        with tracker.scope(name):
            inside.wait(timeout=300)  # both scopes are open at once
            for _ in range(1000):
                tracker.total(count=1)

    async def task(name: str) -> None:
        with tracker.scope(name):
            await asyncio.sleep(0.001)
            tracker.total(count=1)

    async def both() -> None:
        await asyncio.gather(task("c"), task("d"))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    asyncio.run(both())
    assert tracker.export() == {"a/count": 1000.0, "b/count": 1000.0, "c/count": 1.0, "d/count": 1.0}


def test_runs_of_one_process_have_ledgers_of_their_own_and_hand_over_what_they_share():
    tracker = StatsTracker()
    with tracker.ledger("a"):
        tracker.scalar(loss=1.0)
        with tracker.scope("train"):
            tracker.total(tokens=3)
    with tracker.ledger("b"):
        tracker.scalar(loss=5.0)
    tracker.scalar(seconds=2.0)
    tracker.hand_over(["a", "b", "c"])
    assert tracker.export() == {}

    def read(name: str) -> dict[str, float]:
        with tracker.ledger(name):
            return {**tracker.step(), **tracker.export()}

    assert read("a") == {"loss": 1.0, "train/tokens": 3.0, "seconds": 2.0}
    assert read("b") == {"loss": 5.0, "seconds": 2.0}
    assert read("c") == {"seconds": 2.0}
    assert read("a") == {}


def test_a_ledger_belongs_to_its_task():
    tracker = StatsTracker()

    async def record(value: float) -> None:
        await asyncio.sleep(0)
        tracker.scalar(value=value)

    async def both() -> None:
        with tracker.ledger("a"):
            first = asyncio.ensure_future(record(1.0))
        with tracker.ledger("b"):
            second = asyncio.ensure_future(record(2.0))
        await asyncio.gather(first, second)

    asyncio.run(both())
    for name, value in (("a", 1.0), ("b", 2.0)):
        with tracker.ledger(name):
            assert tracker.export() == {"value": value}


def test_one_name_cannot_be_a_mean_and_a_sum():
    tracker = StatsTracker()
    tracker.scalar(tokens=1)
    with pytest.raises(ValueError, match="tokens was recorded by scalar"):
        tracker.total(tokens=1)


def test_the_shared_tracker_is_one_object():
    with stats_tracker.scope("test"):
        stats_tracker.scalar(value=1.0)
    assert stats_tracker.export()["test/value"] == 1.0


def test_stage_times_cover_the_last_step_and_medians_of_top_level_stages():
    times = StageTimes()
    assert times.eta_s(10) is None
    for seconds in (1.0, 9.0, 2.0):
        times.record({"time_s/rollout": seconds, "time_s/actor/forward": 5.0, "loss": 1.0}, seconds + 1)
    times.record({"time_s/eval": 4.0}, 4.0)
    assert times.last() == {"eval": 4.0}
    assert times.median() == {"rollout": 2.0, "eval": 4.0}
    assert times.eta_s(10) == pytest.approx((2 + 10 + 3 + 4) / 4 * 10)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (41.6, "42s"), (59.9, "1m00s"), (185, "3m05s"), (7625, "2h07m"), (4 * 3600 + 3 * 86400, "3d04h")],
)
def test_seconds_are_formatted_as_a_clock(seconds: float, text: str):
    assert clock(seconds) == text
