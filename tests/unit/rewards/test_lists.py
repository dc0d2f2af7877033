"""Reward functions of lists, as TRL and axolotl have them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from list_functions import by_text, conversational, fails, longest, never, one_short, where_it_applies

from megarl.algorithms import GDPO, GDPOConfig
from megarl.rewards.lists import ListReward
from megarl.rewards.pool import RewardConfig, RewardPool
from megarl.rollout.executor import quarantine
from megarl.rollout.reward_call import call_reward
from megarl.rollout.transcript import pad_responses
from megarl.types import ModelResponse, PackedBatch, Reward, RewardError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
TEXTS = ["2", "two", "", "I say 2"]


def scores(*functions: Any, weights: list[float] | None = None) -> list[float | RewardError]:
    """Scores TEXTS through the pool, as a workflow does."""

    async def score() -> list[float | RewardError]:
        return await call_reward(pool, "Be brief. 1+1?", [1], TEXTS, [[2]] * len(TEXTS), {"messages": MESSAGES})

    config = RewardConfig(functions=["f"] * len(functions), weights=weights or [], time_limit_s=60.0)
    with RewardPool(functions, config) as pool:
        return asyncio.run(score())


def test_a_function_of_lists_sees_all_completions_of_a_prompt() -> None:
    assert scores(ListReward(longest)) == [0.0, 0.0, 0.0, 1.0]


def test_a_completion_reads_as_text_and_as_a_conversation() -> None:
    assert scores(ListReward(conversational)) == [1.0, 0.0, 0.0, 0.0]


def test_indices_of_text_are_characters() -> None:
    def first(completions: list[str], **_: Any) -> list[float]:
        return [float(c[:1] == "t" and c[0] == "t" and c[1] == "w" and c[-2] == "w") for c in completions]

    assert scores(ListReward(first)) == [0.0, 1.0, 0.0, 0.0]


def test_none_leaves_a_function_out_of_the_sum() -> None:
    found = scores(ListReward(longest), ListReward(where_it_applies), weights=[1.0, 10.0])
    assert found == [10.0, 0.0, 0.0, 11.0]
    assert isinstance(found[2], Reward)
    assert found[2].parts[0] == 0.0
    assert math.isnan(found[2].parts[1])


def test_a_sample_to_which_no_function_applies_has_failed() -> None:
    assert all("no reward function applies" in str(found) for found in scores(ListReward(never)))


def test_a_failure_of_lists_costs_the_prompt_and_one_of_a_text_its_sample() -> None:
    assert all("fails failed, KeyError: 'no_column'" in str(found) for found in scores(ListReward(fails)))
    assert all("returned 3 values for 4 completions" in str(found) for found in scores(ListReward(one_short)))
    found = scores(by_text, ListReward(longest))
    assert [isinstance(value, RewardError) for value in found] == [False, True, False, False]
    assert found[3] == 8.0


def judged(function: Any, texts: list[str], **data: Any) -> list[float | None]:
    return ListReward(function).score_group("the prompt", [1], texts, [[2]] * len(texts), data)


def test_columns_are_lists_and_replace_no_completion() -> None:
    def keep(
        completions: list[Any], answers: list[str], answer: list[str], labels: list[int], label: list[int], **_: Any
    ) -> list[float]:
        assert answers == answer == ["x", "x"]  # the plural of a column
        assert (labels, label) == ([7, 7], [8, 8])  # a column of its own
        assert completions == ["a", "b"]
        return [1.0, 2.0]

    assert judged(keep, ["a", "b"], completions="a column", answer="x", labels=7, label=8) == [1.0, 2.0]


def test_an_async_function_of_lists_is_awaited() -> None:
    async def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(c)) for c in completions]

    assert judged(lengths, ["a", "bcd"]) == [1.0, 3.0]


def test_text_in_place_of_values_is_refused() -> None:
    with pytest.raises(TypeError, match="it returned 2 values for 2 completions; return a list of one for each"):
        judged(lambda completions, **_: "ab", ["a", "b"])


def test_messages_are_read_like_dictionaries_however_short_the_text() -> None:
    def read(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        assert [c[0].get("name", "nobody") for c in completions] == ["nobody"] * len(completions)
        assert [c[0]["content"] for c in completions] == ["", "ab"]
        assert [p[0]["content"] for p in prompts if messages] == ["hi"] * (2 if messages else 0)
        assert completions[1][1] == "b"  # past the one message, a character
        return [0.0, 0.0]

    for messages in ([{"role": "user", "content": "hi"}], None):
        assert judged(read, ["", "ab"], messages=messages) == [0.0, 0.0]


def test_a_function_of_lists_needs_no_pool() -> None:
    reward = ListReward(longest)
    found = asyncio.run(call_reward(reward, "", [1], TEXTS, [[2]] * 4, {}))
    assert found == [0.0, 0.0, 0.0, 1.0]
    assert reward("", "x", [], []) == 1.0


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_gdpo_normalises_a_reward_over_the_samples_that_it_applies_to(order: list[int]) -> None:
    columns = torch.tensor([[1.0, math.nan], [0.0, 4.0], [1.0, 2.0], [0.0, math.nan]])[order]
    responses = [ModelResponse([1, 1], [2], [0.0], [0])] * 4
    padded = pad_responses(responses, [Reward(float(row.nansum()), row.tolist()) for row in columns])
    batch, dropped = quarantine(PackedBatch.from_padded(padded), None)
    assert batch is not None
    assert dropped == {}
    batch.set_sequences("group_ids", torch.zeros(4, dtype=torch.int64))
    found = GDPO(GDPOConfig(normalize_batch=False)).advantages(batch)[batch["loss_mask"].bool()]
    first, second = columns[:, 0], columns[:, 1]
    of_first = (first - first.mean()) / first.std()
    applied = second[~second.isnan()]
    of_second = ((second - applied.mean()) / applied.std()).nan_to_num(0.0)
    torch.testing.assert_close(found, of_first + of_second, atol=1e-4, rtol=0)
