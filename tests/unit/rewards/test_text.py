"""Rewards that depend on the text only."""

from __future__ import annotations

import pytest

from megarl.rewards.text import exact_match_reward_fn, think_format_reward_fn


def test_an_exact_match_ignores_only_whitespace_at_the_ends() -> None:
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
def test_the_think_format_needs_each_tag_once(text: str, reward: float) -> None:
    assert think_format_reward_fn("", text, [], []) == reward
