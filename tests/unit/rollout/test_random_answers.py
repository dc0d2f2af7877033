"""Damaged answers of servers: an error in one line, or tokens with their own log-probs and versions."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from fault_server import answer
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.api import GenerationError
from megarl.rollout.client.requests import CompletionPart, parse_answer
from megarl.rollout.client.scoring import Query, Scores, TeacherLostError, parse_scores
from tests.damaged_json import damaged
from tests.fuzzing import fuzzed

WHOLE = [answer([4, 5, 6], version="3"), answer([7], version="3", reason="stop")]
WHOLE[0]["meta_info"]["weight_versions"] = [
    {"version": "3", "start": 0, "end": 1},
    {"version": "4", "start": 1, "end": 3},
]
QUERIES = [Query([8, 4, 5, 6], 1), Query([8, 9, 7], 2)]


def scored(query: Query, k: int) -> dict[str, Any]:
    """An answer of SGLang to a query: log-probs of its tokens from the one before `start` on, and the likeliest."""
    tokens = query.ids[query.start - 1 :]
    likely = [[-0.5 - i, i, None] for i in range(k)]
    return {
        "meta_info": {
            "input_token_logprobs": [[None if i == 0 else -0.25 * i, token, None] for i, token in enumerate(tokens)],
            "input_top_logprobs": [None, *(likely for _ in tokens[1:])],
        }
    }


def assert_right(part: CompletionPart, said: dict[str, Any]) -> None:
    """Compares a part with the answer that it is of; log-probs that are not finite keep it out of training."""
    tokens, meta = said["output_ids"], said["meta_info"]
    assert part.tokens == (tokens or [])
    assert part.stop_reason == meta["finish_reason"]["type"]
    assert all(type(token) is int and -(2**31) <= token < 2**31 for token in part.tokens)
    assert len(part.logprobs) == len(part.versions) == len(part.tokens)
    assert all(type(version) is int and -1 <= version < 2**63 for version in part.versions)
    if part.tokens and all(map(math.isfinite, part.logprobs)):
        # JSON's numbers are doubles: an integer beyond 2^53 is the nearest one.
        assert [[value, token] for value, token in zip(part.logprobs, part.tokens, strict=True)] == [
            [float(value), token] for value, token, *_ in meta["output_token_logprobs"]
        ]
        assert max(part.logprobs) <= 1e-3
        spans = [(span["start"], span["end"], int(span["version"])) for span in meta["weight_versions"]]
        for at, version in enumerate(part.versions):
            assert [label for start, end, label in spans if start <= at < end] == [version]


@fuzzed(bounded=500, long=100_000)
def test_a_damaged_answer_is_refused_or_read_as_it_is(effort: Any) -> None:
    @effort
    @given(damaged(WHOLE))
    def holds(body: bytes) -> None:
        try:
            parts = parse_answer(body, 2, "server:1")
        except GenerationError as error:
            line = str(error)
        else:
            for part, said in zip(parts, orjson.loads(body), strict=True):
                assert_right(part, said)
            return
        assert line.startswith("server:1 gave a malformed answer (")
        assert "\n" not in line

    holds()


@fuzzed(bounded=300, long=50_000)
def test_a_damaged_answer_of_a_teacher_is_refused_or_read_as_it_is(effort: Any) -> None:
    @effort
    @given(st.sampled_from([0, 2]).flatmap(lambda k: st.tuples(st.just(k), damaged([scored(q, k) for q in QUERIES]))))
    def holds(case: tuple[int, bytes]) -> None:
        k, body = case
        try:
            scores = parse_scores(body, QUERIES, k, "teacher:1")
        except TeacherLostError as error:
            line = str(error)
        else:
            assert_scored(scores, orjson.loads(body), k)
            return
        assert line.startswith("the teacher server at teacher:1 gave a malformed answer (")
        assert "\n" not in line

    holds()


def assert_scored(scores: list[Scores], answers: list[dict[str, Any]], k: int) -> None:
    """Compares scores with the answers that they are of."""
    for query, score, said in zip(QUERIES, scores, answers, strict=True):
        entries = said["meta_info"]["input_token_logprobs"][1:]
        assert query.ids[query.start :] == [token for _, token, *_ in entries]
        assert score.logprobs == [float(value) for value, *_ in entries]
        assert all(map(math.isfinite, score.logprobs))
        tops = said["meta_info"]["input_top_logprobs"][1:] if k else []
        assert score.top_ids == [[token for _, token, *_ in top] for top in tops]
        assert score.top_logprobs == [[float(value) for value, *_ in top] for top in tops]
        assert all(len(ids) == k for ids in score.top_ids)


@pytest.mark.parametrize(
    "change",
    [
        {"output_ids": "abc"},
        {"output_ids": [4, 5.0]},
        {"output_ids": [4, True]},
        {"output_ids": [4, -(2**31) - 1]},
        {"output_ids": [4, 2**31]},
        {"weight_versions": [{"version": "9" * 40, "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "1", "start": 0, "end": 2.0}]},
        {"output_token_logprobs": [["-1", 4, None], [-1.0, 5, None]]},
    ],
)
def test_tokens_log_probs_and_versions_of_another_type_or_size_are_malformed(change: dict[str, Any]) -> None:
    part = answer([4, 5])
    part.update({key: value for key, value in change.items() if key == "output_ids"})
    part["meta_info"].update({key: value for key, value in change.items() if key != "output_ids"})
    with pytest.raises(GenerationError, match="gave a malformed answer"):
        parse_answer(orjson.dumps([part]), 1, "server:1")


def test_a_version_of_more_tokens_than_there_are_takes_no_memory() -> None:
    part = answer([4, 5])
    part["meta_info"]["weight_versions"][0]["end"] = 10**12
    (read,) = parse_answer(orjson.dumps([part]), 1, "server:1")
    assert (read.tokens, read.versions) == ([4, 5], [-1, -1])


@pytest.mark.parametrize(("logprob", "kept"), [(1e-7, True), (0.0, True), (0.01, False), (2**53 + 1, False)])
def test_a_completion_with_a_log_prob_above_rounding_is_left_out(
    logprob: float, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    part, other = answer([4, 5]), answer([6])
    part["meta_info"]["output_token_logprobs"][0][0] = logprob
    read, untouched = parse_answer(orjson.dumps([part, other]), 2, "server:1")
    assert all(map(math.isfinite, untouched.logprobs))
    if kept:
        assert read.logprobs[0] == logprob
    else:
        assert all(map(math.isnan, read.logprobs))
        assert f"at most {logprob:g}" in caplog.text


def test_an_answer_in_an_error_does_not_steer_the_terminal() -> None:
    """JSON may hold C1 controls and marks of direction as they are."""
    with pytest.raises(GenerationError, match=r"\\x9b31m\\u202e") as error:
        parse_answer('{"\x9b31m\u202e": 1}'.encode(), 1, "server:1")
    assert str(error.value).isprintable()
