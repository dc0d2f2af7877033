"""Steps recorded with torch.profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megarl.checks import config_checks
from megarl.config import Config
from megarl.knobs import UserError, run_all
from megarl.observe.logger import LoggerConfig
from megarl.observe.profiler import StepProfiler


def profile(folder: Path, config: LoggerConfig, steps: range) -> list[str]:
    profiler = StepProfiler(config, folder, rank=3)
    for step in steps:
        profiler.begin_step(step)
        torch.ones(3) + step
        profiler.end_step(step)
    profiler.close()
    return sorted(path.name for path in folder.glob("*"))


def test_the_steps_asked_for_are_in_one_trace_of_the_rank(tmp_path: Path) -> None:
    assert profile(tmp_path, LoggerConfig(profile_from=2, profile_steps=2), range(1, 6)) == ["rank_3.steps_2-3.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "rank_3.steps_2-3.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::add" for event in events) == 2


def test_nothing_is_recorded_by_default(tmp_path: Path) -> None:
    assert profile(tmp_path, LoggerConfig(), range(1, 6)) == []


def test_a_run_resumed_or_ended_within_the_range_keeps_the_steps_it_took(tmp_path: Path) -> None:
    assert profile(tmp_path, LoggerConfig(profile_from=2, profile_steps=9), range(4, 6)) == ["rank_3.steps_4-5.json.gz"]


@pytest.mark.parametrize(("first", "steps", "fits"), [(8, 1, True), (8, 2, False), (9, 1, False), (0, 100, True)])
def test_a_range_that_the_run_does_not_reach_is_refused_in_one_line(first: int, steps: int, fits: bool) -> None:
    config = Config(method="sft", total_train_steps=8, logger=LoggerConfig(profile_from=first, profile_steps=steps))
    if fits:
        run_all(config_checks(config))
        return
    with pytest.raises(UserError, match=rf"logger\.profile_from={first} .* after total_train_steps=8") as error:
        run_all(config_checks(config))
    assert "\n" not in str(error.value)
