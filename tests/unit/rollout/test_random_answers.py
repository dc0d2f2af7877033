"""Damaged answers of a server: a GenerationError in one line, or tokens with their own log-probs and versions."""

from __future__ import annotations

import copy
import math
from typing import Any

import orjson
import pytest
from fault_server import answer
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.api import GenerationError
from megarl.rollout.client.requests import CompletionPart, parse_answer
from tests.fuzzing import fuzzed

# Lists and dicts are new ones each time: a later change may reach into them.
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.integers(-2, 9), st.floats(),
    st.sampled_from(["", "0", "7", "abort", "٣", "9" * 40, "nan"]),
    st.builds(list), st.builds(dict), st.builds(lambda: [1, 2]),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [inner for key, child in items for inner in [(*path, key), *places(child, (*path, key))]]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The body of an answer of two completions, one over two versions, after up to three changes."""
    whole = [answer([4, 5, 6], version="3"), answer([7], version="3", reason="stop")]
    whole[0]["meta_info"]["weight_versions"] = [
        {"version": "3", "start": 0, "end": 1},
        {"version": "4", "start": 1, "end": 3},
    ]
    body: Any = copy.deepcopy(whole)
    for _ in range(draw(st.integers(0, 3))):
        if not (paths := places(body)):
            break
        *parents, key = draw(st.sampled_from(paths))
        parent = body
        for step in parents:
            parent = parent[step]
        change = draw(st.sampled_from(["replace", "replace", "remove", "reverse", "repeat"]))
        if change == "replace":
            parent[key] = draw(VALUES)
        elif change == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent[:] = parent[::-1] if change == "reverse" else [*parent, parent[key]]
    text = orjson.dumps(body, option=orjson.OPT_INDENT_2 if draw(st.booleans()) else None)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


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
    @given(damaged())
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
