"""Prompts that ask for a boxed answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.config import DatasetConfig
from megarl.data.prompts import get_rl_dataset
from megarl.rewards.math import math_reward_fn


@pytest.mark.parametrize(("problem", "answer"), [("prompt", "solution"), ("problem", "answer")])
def test_rows_become_prompts_that_the_math_reward_can_judge(
    problem: str, answer: str, tmp_path: Path, tokenizer: Any
) -> None:
    row = {problem: "What is 2 + 3?", answer: 5, "source": "made up"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    options = {"field_problem": problem, "field_answer": answer} if problem == "prompt" else {}
    config = DatasetConfig(str(tmp_path), name="", type="megarl.data.boxed.to_prompt", options=options)
    (prompt_row,) = get_rl_dataset(config, tokenizer)
    assert prompt_row["messages"][0]["content"].startswith("What is 2 + 3?\nReason step by step")
    assert prompt_row["answer"] == "5"
    data = {name: value for name, value in prompt_row.items() if name != "messages"}
    assert math_reward_fn("", r"so \boxed{5}", [], [], **data) == 1.0
    assert math_reward_fn("", r"so \boxed{6}", [], [], **data) == 0.0
