"""Engines on one frozen base train as each does alone, bit for bit: two policies and a critic, in turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.weights.peft_files import CONFIG, WEIGHTS
from megarl.launcher.local import run_ranks
from tests import rows
from tests.distributed.shared_base_worker import ENGINES, STEPS, VOCABULARY

pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"tp1": {}},
    2: {"tp2": {"tp_size": 2}, "dp2": {"dp_size": 2}, "pp2": {"pp_size": 2}},
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"family": "qwen3", "tied": True},
    "untied": {"family": "qwen2", "tied": False},
    "experts": {"family": "qwen3_moe", "tied": False},
    "biased_choice": {"family": "deepseek_v3", "tied": False},
}
ALL_RUNS = {
    "tp1": ["biased_choice", "tied", "experts", "untied"],
    "pp2": ["tied", "untied"],
    "dp2": ["tied"],
    "tp2": ["untied", "tied"],
}
RUNS = ALL_RUNS if rows.wants_all() else {"tp1": ["biased_choice"], "pp2": [], "dp2": [], "tp2": ["tied"]}
CASES = [(size, layout, name) for size, layouts in LAYOUTS.items() for layout in layouts for name in RUNS[layout]]


@pytest.fixture(scope="module")
def outputs(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what every layout computed; all layouts of a world size run in one start of its ranks."""
    work = tmp_path_factory.mktemp("shared_base")
    for name, fields in MODELS.items():
        (work / name).mkdir()
        (work / name / "model").symlink_to(checkpoints(vocab_size=VOCABULARY, **fields))
    for size, layouts in LAYOUTS.items():
        logs = work / f"logs_{size}"
        logs.mkdir()
        arguments = [str(work), json.dumps(layouts), json.dumps(RUNS)]
        code = run_ranks("tests.distributed.shared_base_worker", arguments, size, logs)
        assert not code, "\n".join(path.read_text()[-3000:] for path in logs.iterdir())
    return work


@pytest.mark.parametrize(("size", "layout", "name"), CASES)
def test_engines_on_one_base_train_as_each_does_alone(size: int, layout: str, name: str, outputs: Path) -> None:
    for rank in range(size):
        found = json.loads((outputs / name / layout / f"rank_{rank}.json").read_text())
        alone, together, facts = found["alone"], found["together"], found["facts"]
        for engine in ENGINES:
            (steps, state), (expected_steps, expected) = together[engine], alone[engine]
            assert steps == expected_steps, engine
            assert len({stats["loss"] for stats, _ in steps}) == STEPS
            assert {key: state[key] for key in expected} == expected, engine
            assert rank or {CONFIG, WEIGHTS} <= expected.keys()
        assert facts["frozen"] >= 8
        assert not any(facts[f"own frozen of {engine}"] for engine in ENGINES)
        assert facts["changed"] == []
        assert facts["resumed"]
        assert facts["others as before"]
        assert facts["goes on"] == "0.0"
