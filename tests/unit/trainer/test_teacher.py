"""Prompts that a teacher alone reads, and answers of its servers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megarl import cli
from megarl.data.templates import prompt_ids as data_prompt_ids
from megarl.rollout.client.scoring import SEQUENCES_AT_ONCE, Query, Scorer, Scores, TeacherLostError, parse_scores
from megarl.rollout.transcript import prompt_ids
from megarl.rollout.workflows.distil import HintedWorkflow, hinted_ids
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.trainer.teacher import TEACHER_PROMPT, _at, score_by_servers, with_teacher_prompts
from megarl.types import GenerationHyperparameters, PackedBatch, cu_seqlens_of


def hinted_batch() -> PackedBatch:
    """Two sequences, of prompts with two and three tokens; the second has an untrained token inside its answer."""
    batch = PackedBatch(
        cu_seqlens_of(torch.tensor([4, 6])),
        {
            "input_ids": torch.tensor([1, 2, 10, 11, 3, 4, 5, 12, 13, 14]),
            "loss_mask": torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0, 1]).bool(),
        },
        {"group_ids": torch.tensor([0, 1])},
    )
    batch.set_sequences(TEACHER_PROMPT, torch.tensor([[1, 2, 90, -1], [3, -1, -1, -1]]))
    return batch


def test_a_teacher_reads_its_own_prompt_and_the_students_answer() -> None:
    read, index = with_teacher_prompts(hinted_batch())
    assert [part.tolist() for part in read.split(read["input_ids"])] == [[1, 2, 90, 10, 11], [3, 12, 13, 14]]
    assert [part.int().tolist() for part in read.split(read["loss_mask"])] == [[0, 0, 0, 1, 1], [0, 1, 0, 1]]
    assert index.tolist() == [-1, -1, 3, 4, -1, -1, -1, 6, 7, 8]


def test_a_teachers_figures_come_back_to_the_students_tokens() -> None:
    batch = hinted_batch()
    read, index = with_teacher_prompts(batch)
    back = _at(read["input_ids"], index)
    assert torch.equal(back[batch["loss_mask"]], batch["input_ids"][batch["loss_mask"]])
    assert not back[index < 0].any()
    assert _at(torch.ones(9, 3), index).shape == (10, 3)


def test_a_hint_stands_at_the_end_of_the_last_user_message() -> None:
    tokenizer = AutoTokenizer.from_pretrained(cli.ASSETS / "tiny")
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    ids = hinted_ids(messages, "It is 3.", tokenizer)
    assert "What is 1 + 2?\nIt is 3." in tokenizer.decode(ids)
    assert messages[0]["content"] == "What is 1 + 2?"


@pytest.mark.parametrize("template", ["qwen3", "glm_4_5"])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_hinted_prompt_ends_as_the_students(template: str, thinks: bool) -> None:
    """Else the teacher expects `<think>` where the student's answer begins."""
    tokenizer = AutoTokenizer.from_pretrained(cli.ASSETS / "tiny")
    folder = Path(__file__).parents[1] / "rollout" / "chat_templates"
    tokenizer.chat_template = (folder / f"{template}.jinja").read_text()
    messages = [{"role": "user", "content": "What is 1 + 2?"}]

    class Sampled(RLVRWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            own = prompt_ids(tokenizer, data["messages"], enable_thinking=self.enable_thinking)
            return {"input_ids": torch.tensor([own])}

    inner = Sampled(lambda **_: 0.0, GenerationHyperparameters(), tokenizer, enable_thinking=thinks)
    engine: Any = None
    result = asyncio.run(HintedWorkflow(inner, "It is 3.", 100, tokenizer).arun_episode(engine, {"messages": messages}))
    own, hinted = (
        tokenizer.decode([token for token in result[name][0].tolist() if token >= 0])
        for name in ("input_ids", "teacher_prompt")
    )
    assert hinted.partition("It is 3.")[2] == own.partition("1 + 2?")[2]
    if not thinks:  # the prompts of the data, too
        assert tokenizer.decode(data_prompt_ids(tokenizer, messages)) == own


class Recorded:
    """A scorer that answers with numbers of its own, so that their places can be told. Replaces a server."""

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def score(self, queries: list[Query], k: int) -> list[Scores]:
        self.queries = queries
        counts = [len(query.ids) - query.start for query in queries]
        return [Scores([-1.0 - i for i in range(n)], [[7] * k] * n, [[-0.5] * k] * n) for n in counts]


def test_servers_are_asked_from_the_first_trained_token_on() -> None:
    scorer: Any = Recorded()
    figures = score_by_servers(scorer, hinted_batch(), 0)
    assert [(len(query.ids), query.start) for query in scorer.queries] == [(4, 2), (6, 3)]
    assert figures["teacher_logp"].tolist() == [0, 0, -1, -2, 0, 0, 0, -1, 0, -3]
    top = score_by_servers(scorer, hinted_batch(), 2)
    assert top["teacher_ids"].shape == top["teacher_top_logp"].shape == (10, 2)
    assert top["teacher_ids"][:, 0].tolist() == [0, 0, 7, 7, 0, 0, 0, 7, 0, 7]


def answer(**changes: Any) -> bytes:
    """A server's answer about tokens 5 6 7 from the second on, with the two most likely tokens."""
    top = [[-0.1, 6, None], [-2.0, 9, None]]
    meta = {
        "input_token_logprobs": [[None, 5, None], [-0.1, 6, None], [-0.7, 7, None]],
        "input_top_logprobs": [None, top, top],
    }
    return json.dumps([{"meta_info": {**meta, **changes}}]).encode()


QUERY = Query([5, 6, 7], 1)


def test_an_answer_is_parsed() -> None:
    (scores,) = parse_scores(answer(), [QUERY], 2, "here")
    assert scores == Scores([-0.1, -0.7], [[6, 9], [6, 9]], [[-0.1, -2.0], [-0.1, -2.0]])


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        answer(input_token_logprobs=[[None, 5, None], [-0.1, 6, None]]),
        answer(input_token_logprobs=[[None, 5, None], [-0.1, 6, None], [-0.7, 8, None]]),
        answer(input_token_logprobs=[[None, 5, None], [-0.1, 6, None], [None, 7, None]]),
        answer(input_top_logprobs=None),
        answer(input_top_logprobs=[None, [[-0.1, 6, None]], [[-0.1, 6, None]]]),
        answer(input_top_logprobs=[None, [[-0.1, 6, None], [-2.0, -9, None]], [[-0.1, 6, None], [-2.0, 9, None]]]),
    ],
)
def test_an_answer_about_other_tokens_ends_the_run_with_one_line(body: bytes) -> None:
    with pytest.raises(TeacherLostError) as lost:
        parse_scores(body, [QUERY], 2, "host:1")
    assert "host:1 gave a malformed answer" in str(lost.value)
    assert "\n" not in str(lost.value)


def test_a_server_that_is_not_there_is_waited_for_and_then_named() -> None:
    scorer = Scorer(["127.0.0.1:9"], "", max_requests=2, request_s=5.0, wait_s=0.1)
    try:
        with pytest.raises(TeacherLostError, match=r"127\.0\.0\.1:9 is lost .* within teacher\.wait_s=0\.1 s"):
            scorer.score([QUERY] * 40, 0)
    finally:
        scorer.close()


@pytest.mark.parametrize("parts", [1, 5])
def test_all_requests_together_have_the_time_that_each_may_take(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher that takes requests and answers none is named, before the whole is out of time."""
    scorer = Scorer(["127.0.0.1:9"], "", max_requests=2, request_s=400.0, wait_s=600.0)
    limits = []

    def run(work: Coroutine[Any, Any, Any], limit: float, what: str) -> list[Any]:
        limits.append(limit)
        work.close()
        return []

    monkeypatch.setattr(scorer._thread, "run", run)
    scorer.score([QUERY] * SEQUENCES_AT_ONCE * parts, 0)
    monkeypatch.undo()
    scorer.close()
    first, retries = 400.0, 2 * (1.0 + 400.0)  # the second begins within the 600 s
    assert limits[0] > math.ceil(parts / 2) * (first + retries)
