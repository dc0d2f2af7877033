"""An environment that breaks in the middle of a run: the run goes on, and its last line says how often, and why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_failing_reward import OVERRIDES, train

WORLD = '''
"""Its third episode in a process fails in `step`; its `close` fails too."""

from megarl.environments.base import Environment, Step


class Late(Environment):
    def __init__(self):
        self.episodes = 0

    def reset(self, row):
        self.episodes += 1
        return "Go."

    def step(self, answer):
        if self.episodes == 3:
            raise OSError("the simulator is gone")
        return Step(reward=float(len(answer) % 2), done=True)

    def close(self):
        raise OSError("the door is stuck")
'''


@pytest.mark.long
def test_an_environment_that_fails_late_costs_its_episodes_and_is_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "late_world.py").write_text(WORLD)
    knobs = ("rollout.workflow=environment", "rollout.environment.kind=late_world.Late", "total_train_steps=3")
    fewer = ("rollout.environment.max_processes=4", "valid_dataset.split='test[:8]'", f"run_root={tmp_path / 'runs'}")
    overrides = [text for text in OVERRIDES if not text.startswith(("rewards", "total_train_steps"))]
    done = train(tmp_path, *overrides, *knobs, *fewer)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    cause = r"step\(\) failed, OSError: the simulator is gone"
    lost = re.fullmatch(
        rf"(\d+) of (\d+) episodes were lost in the environment: (\d+) failed, the first: {cause}", last
    )
    assert lost is not None, done.stdout
    assert 0 < int(lost[1]) == int(lost[3]) < int(lost[2])
    (run,) = (tmp_path / "runs/gsm8k_grpo").glob("2*")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3
    assert sum("OSError: the simulator is gone" in line for line in done.stderr.splitlines()) == 1
    assert sum("close() failed, OSError: the door is stuck" in line for line in done.stderr.splitlines()) >= 1
