"""Curves of a run: thinned out without losing a spike, and seconds of one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.board import curves
from megarl.observe.board.curves import Curves, thinned


def curves_of(folder: Path, lines: list[dict[str, Any]]) -> Curves:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = Curves(path)
    read.refresh()
    return read


def test_a_spike_among_a_hundred_thousand_steps_stays() -> None:
    values = [0.5] * 100_000
    values[77_777], values[12_345] = 9.0, -3.0
    steps, kept = thinned(range(1, 100_001), values)
    assert len(kept) <= curves.MAX_POINTS
    assert steps[0] == 1
    assert steps[-1] == 100_000
    assert steps == sorted(steps)
    assert kept[steps.index(77_778)] == 9.0
    assert kept[steps.index(12_346)] == -3.0


def test_seconds_of_a_line_of_several_steps_are_shown_for_one(tmp_path: Path) -> None:
    read = curves_of(tmp_path, [{"step": step, "time_s/update": 3.0} for step in (2, 8)])
    assert read.timings() == [("update", 1.5, 1.5, 6.0)]
    assert read.stages() == {"update": [[2.0, 8.0], [1.5, 0.5]]}


def test_the_median_of_a_stage_is_over_the_steps_that_had_it(tmp_path: Path) -> None:
    lines = [{"step": s, "time_s/update": 1.0} | ({"time_s/evaluate": 8.0} if s == 4 else {}) for s in range(1, 5)]
    assert curves_of(tmp_path, lines).timings() == [("evaluate", 8.0, 8.0, 8.0), ("update", 1.0, 1.0, 4.0)]


def test_the_evaluation_before_training_counts_as_a_whole(tmp_path: Path) -> None:
    lines = [{"step": 0, "time_s/evaluate": 4.0}, {"step": 1, "time_s/update": 1.0}]
    assert curves_of(tmp_path, lines).timings() == [("evaluate", 4.0, 4.0, 4.0), ("update", 1.0, 1.0, 1.0)]


def test_hours_begin_with_the_run(tmp_path: Path) -> None:
    read = curves_of(tmp_path, [{"step": step, "time": 1.7e9 + 1800 * step} for step in (1, 2, 5)])
    assert read.hours() == [[1.0, 2.0, 5.0], [0.0, 0.5, 2.0]]


def test_parts_of_a_stage_are_no_stages_and_stages_no_curves(tmp_path: Path) -> None:
    read = curves_of(tmp_path, [{"step": 1, "a": 1.0, "time_s/sync": 2.0, "time_s/sync/canary": 1.0}])
    assert read.stage_names() == ["sync"]
    assert list(read.series()) == ["a"]


def test_stages_of_many_steps_are_means(tmp_path: Path) -> None:
    count = 2 * curves.MAX_POINTS
    read = curves_of(tmp_path, [{"step": s, "time_s/update": float(s % 2)} for s in range(1, count + 1)])
    steps, seconds = read.stages()["update"]
    assert steps == [float(s) for s in range(2, count + 1, 2)]
    assert set(seconds) == {0.5}


def test_values_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "a": "nan", "b": 1, "c": True, "d": 10**400, "e": None},
        {"step": 2, "a": 2.5, "b": "inf"},
        {"b": 3},
    ]
    read = curves_of(tmp_path, lines)
    assert read.series() == {"b": [[1.0], [1.0]], "a": [[2.0], [2.5]]}
    assert read.file.damaged == 1  # the line without a step


def test_a_resumed_run_s_repeated_steps_replace_the_earlier(tmp_path: Path) -> None:
    read = curves_of(tmp_path, [{"step": s, "a": s} for s in (1, 2, 3)])
    stamp = read.stamp
    new = tmp_path / "new"
    new.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 7}\n')
    new.replace(tmp_path / "metrics.jsonl")
    read.refresh()
    assert read.series() == {"a": [[1.0, 2.0], [1.0, 7.0]]}
    assert read.stamp != stamp


@pytest.mark.parametrize("count", [1, 2, 799, 800, 801, 1601])
def test_thinned_curves_have_both_ends_and_each_point_once(count: int) -> None:
    steps, values = thinned(range(count), [(n * 7919) % 1000 for n in range(count)])
    assert steps[0] == 0
    assert steps[-1] == count - 1
    assert len(set(steps)) == len(steps) == len(values) <= max(curves.MAX_POINTS, 2)
