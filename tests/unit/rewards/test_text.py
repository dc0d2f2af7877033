"""Rewards on the text alone."""

from __future__ import annotations

import pytest

from megarl.rewards.text import exact_match_reward_fn, length_reward_fn, pattern_reward_fn, think_format_reward_fn


def test_an_exact_match_forgives_spaces_at_the_ends_only() -> None:
    assert exact_match_reward_fn("", " 42\n", [], [], answer="42") == 1.0
    assert exact_match_reward_fn("", "4 2", [], [], answer="42") == 0.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n<answer>c</answer>\n", 1.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
    ],
)
def test_the_think_format_wants_each_tag_once(text: str, reward: float) -> None:
    assert think_format_reward_fn("", text, [], []) == reward


def test_a_pattern_matches_the_whole_completion() -> None:
    reward = pattern_reward_fn(r"a.*b")
    assert reward("", "a\nb", [], []) == 1.0
    assert reward("", "a\nb ", [], []) == 0.0


def test_length_counts_tokens_from_the_target() -> None:
    reward = length_reward_fn(target=10, tolerance=5)
    assert [reward("", "", [], [0] * n) for n in (10, 12, 5, 15, 40)] == pytest.approx([1.0, 0.6, 0.0, 0.0, 0.0])
