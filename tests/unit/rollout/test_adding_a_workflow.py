"""Runs docs/adding_a_workflow.md: its workflow, chosen by its command, on a server that answers from a script."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import DATA, reward_of_seven, sequences

from megarl import cli
from megarl.rollout.workflows.choose import DEFAULT, build_workflow
from megarl.types import GenerationHyperparameters

PAGE = (Path(__file__).parents[3] / "docs" / "adding_a_workflow.md").read_text(encoding="utf-8")
GCONFIG = GenerationHyperparameters(n_samples=2, max_new_tokens=16)


@pytest.fixture
def workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Iterator[Any]:
    """The page's file in the working folder, built by the page's command."""
    (source,) = re.findall(r"^```python second_thought.py\n(.*?)^```$", PAGE, re.M | re.S)
    (tmp_path / "second_thought.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^python -m megarl\.train (.*)$", PAGE, re.M)
    yield build_workflow(cli.load(command.split()).rollout, DEFAULT, reward_of_seven, GCONFIG, tokenizer)
    sys.modules.pop("second_thought", None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def answers(prompt: str, _: dict[str, Any]) -> str:
    return "7" if "sure" in prompt else "8"


def test_the_example_trains_on_both_answers_and_scores_the_last(workflow: Any, say: Any, tokenizer: Any) -> None:
    engine = say(answers)
    names = {
        "engine": engine, "data": DATA, "reward_fn": reward_of_seven, "gconfig": GCONFIG, "tokenizer": tokenizer,
        "SecondThoughtWorkflow": type(workflow),
    }  # fmt: skip
    (call,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    exec(call, names)
    for batch in (names["batch"], engine.rollout_batch([DATA], workflow)):
        assert batch["rewards"].tolist() == [1.0, 1.0]
        for whole, trained in sequences(batch, tokenizer):
            assert trained.replace(tokenizer.eos_token, "") == "87"
            assert "Are you sure?" in whole
        for key in ("rollout_logprobs", "versions", "group_ids"):
            assert key in batch


def test_the_example_ends_with_one_answer_where_the_sequence_is_full(workflow: Any, say: Any, tokenizer: Any) -> None:
    engine = say(answers)
    engine.max_sequence_tokens = len(tokenizer.apply_chat_template(DATA["messages"], return_dict=False)) + 10
    batch = engine.rollout_batch([DATA], workflow)
    assert batch["rewards"].tolist() == [0.0, 0.0]
    assert {trained for _, trained in sequences(batch, tokenizer)} == {f"8{tokenizer.eos_token}"}
