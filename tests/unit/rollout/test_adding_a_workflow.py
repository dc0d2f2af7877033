"""Runs docs/adding_a_workflow.md: its workflow, on a server that says what it is told."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from fault_server import answer

from megarl.data.tokenizer import train_tokenizer
from megarl.types import GenerationHyperparameters

PAGE = (Path(__file__).parents[3] / "docs" / "adding_a_workflow.md").read_text(encoding="utf-8")
DATA = {"messages": [{"role": "user", "content": "Leo has 7 pens."}], "answer": "7"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file that the page writes, as a module."""
    (source,) = re.findall(r"^```python megarl/rollout/workflows/second_thought.py\n(.*?)^```$", PAGE, re.M | re.S)
    made = ModuleType("second_thought")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(source, "second_thought.py", "exec"), vars(made))
    return made


def reward_of_answer(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any):
    return float(completions.strip() == data["answer"])


def test_the_example_trains_on_both_answers_and_scores_the_last(
    module: ModuleType, start_server: Any, connect: Any
) -> None:
    tokenizer = train_tokenizer()

    async def reply(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        prompts = [tokenizer.decode(ids) for ids in body["input_ids"]]
        texts = ["7" if "sure" in prompt else "8" for prompt in prompts]
        return web.json_response(
            [answer([*tokenizer.encode(text), tokenizer.eos_token_id], reason="stop") for text in texts]
        )

    engine = connect(start_server(reply))
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=16)
    names = {
        "engine": engine, "data": DATA, "reward_fn": reward_of_answer, "gconfig": gconfig, "tokenizer": tokenizer,
        "SecondThoughtWorkflow": module.SecondThoughtWorkflow,
    }  # fmt: skip
    (call,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    exec(call, names)
    batch = names["batch"]
    assert batch["rewards"].tolist() == [1.0, 1.0]
    for ids, mask in zip(
        batch["input_ids"].split(batch.lengths.tolist()), batch["loss_mask"].split(batch.lengths.tolist()), strict=True
    ):
        trained = tokenizer.decode(ids[mask], skip_special_tokens=True)
        assert "".join(trained.split()) == "87"
        assert "Are you sure?" in tokenizer.decode(ids)
    for key in ("rollout_logprobs", "versions", "group_ids"):
        assert key in batch
