"""The timeline that ranks record, and the trace made of it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.observe import timeline as module
from megarl.observe.metrics import StatsTracker
from megarl.observe.timeline import Timeline, in_rows, trace_events


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_the_spans_of_its_step_alone(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.open(tmp_path / "timeline" / "rank_0.jsonl")
    with timeline.span("update"), timeline.span("forward"):
        pass
    timeline.end_step(1)
    with timeline.span("rollout"):
        pass
    timeline.end_step(2)
    timeline.close(2)
    first, second = lines_of(tmp_path / "timeline" / "rank_0.jsonl")
    assert [span[0] for span in first["spans"]] == ["forward", "update"]
    (_, _, start, end), (_, _, outer_start, outer_end) = first["spans"]
    assert outer_start <= start <= end <= outer_end
    assert [span[0] for span in second["spans"]] == ["rollout"]
    assert (first["step"], second["step"]) == (1, 2)


def test_nothing_is_recorded_before_open_or_after_close(tmp_path: Path) -> None:
    timeline = Timeline()
    with timeline.span("early"):
        timeline.load("a:1", 3)
    timeline.open(tmp_path / "t.jsonl")
    with timeline.span("late"):
        pass
    timeline.close(7)
    timeline.close(7)
    with timeline.span("too late"):
        pass
    timeline.end_step(8)
    (line,) = lines_of(tmp_path / "t.jsonl")
    assert line["step"] == 7
    assert [span[0] for span in line["spans"]] == ["late"]
    assert line["loads"] == {}


def test_spans_of_other_threads_have_lanes_of_their_own(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.open(tmp_path / "t.jsonl")

    def work() -> None:
        with timeline.span("inside"):
            pass

    thread = threading.Thread(target=work, name="rollout")
    thread.start()
    thread.join()
    timeline.end_step(1)
    assert [span[:2] for span in lines_of(tmp_path / "t.jsonl")[0]["spans"]] == [["inside", "rollout"]]


def test_a_step_keeps_a_bounded_number_of_spans_and_counts_the_rest(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.open(tmp_path / "t.jsonl")
    for n in range(module.MAX_SPANS + 5):
        timeline.add("x", n, n + 1)
    timeline.end_step(1)
    timeline.end_step(2)
    line, following = lines_of(tmp_path / "t.jsonl")
    assert len(line["spans"]) == module.MAX_SPANS
    assert line["left_out"] == 5
    assert "left_out" not in following


def test_a_span_that_fails_is_recorded(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.open(tmp_path / "t.jsonl")
    with pytest.raises(ValueError, match="broken"), timeline.span("update"):
        raise ValueError("broken")
    timeline.close(1)
    assert [span[0] for span in lines_of(tmp_path / "t.jsonl")[0]["spans"]] == ["update"]


def test_loads_are_thinned_out_and_keep_their_last_value() -> None:
    loads = module._Loads()
    for n in range(100_000):
        loads.add(n / 100, n)
    taken = loads.taken()
    assert module.MAX_LOADS / 4 < len(taken) <= module.MAX_LOADS
    assert taken[0] == [0.0, 0]
    assert taken[-1] == [999.99, 99_999]
    times = [when for when, _ in taken]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == sorted(times)
    assert max(gaps[:-1]) < 8 * 1000 / module.MAX_LOADS  # evenly
    assert loads.taken() == [[999.99, 99_999]]  # the next step continues from it


def test_metrics_timings_are_spans_too(tmp_path: Path, monkeypatch: Any) -> None:
    timeline = Timeline()
    monkeypatch.setattr("megarl.observe.metrics.timeline", timeline)
    timeline.open(tmp_path / "t.jsonl")
    tracker, before = StatsTracker(), time.time()
    with tracker.scope("sync"), tracker.record_timing("canary"):
        time.sleep(0.02)
    after = time.time()
    timeline.end_step(1)
    (line,) = lines_of(tmp_path / "t.jsonl")
    ((name, _, start, end),) = line["spans"]
    assert name == "sync/canary"
    assert before - 1e-5 <= start <= end <= after + 1e-5  # spans are rounded to 10 us
    assert end - start >= 0.02 - 1e-5
    assert 0.02 <= tracker.export()["time_s/sync/canary"] <= after - before + 0.001  # of another clock


def test_overlapping_spans_get_rows_in_which_they_nest() -> None:
    spans = [("a", "", 0.0, 2.0), ("b", "", 1.0, 3.0), ("c", "", 0.5, 1.5), ("d", "other", 0.0, 9.0)]
    rows = {name: row for name, _, _, _, row in in_rows(spans)}
    assert rows == {"a": 0, "c": 0, "b": 1, "d": 0}


def test_spans_that_touch_or_begin_together_share_a_row() -> None:
    spans = [("inner", "", 0.0, 1.0), ("outer", "", 0.0, 2.0), ("next", "", 2.0, 3.0)]
    assert [(name, row) for name, _, _, _, row in in_rows(spans)] == [("outer", 0), ("inner", 0), ("next", 0)]


def test_the_trace_has_a_process_per_rank_and_microseconds() -> None:
    spans = [["update", "", 10.0, 10.5], ["x", "", 10.2, 11.0], ["y", "rollout", 10.0, 10.1]]
    line = {"step": 3, "spans": spans, "loads": {"a:1": [[10.0, 4]]}}
    events = list(trace_events("rank 0", 7, [line]))
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "rank 0"}}
    complete = [event for event in events if event["ph"] == "X"]
    assert complete[0] == {
        "name": "update", "ph": "X", "pid": 7, "tid": 0, "ts": 10_000_000, "dur": 500_000, "args": {"step": 3},
    }  # fmt: skip
    titles = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["name"]: titles[event["tid"]] for event in complete} == {
        "update": "main", "x": "main (2)", "y": "rollout",  # x overlaps the update without nesting in it
    }  # fmt: skip
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert counter["args"] == {"running": 4}
    assert counter["ts"] == 10_000_000
