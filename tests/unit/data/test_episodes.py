"""Rows for environments, made from rows of another data set."""

from __future__ import annotations

from typing import Any

from megarl.data.episodes import SEEDS, to_episode, to_program
from megarl.sandbox.programs import run_test

ROWS = [{"question": f"{number}?", "answer": f"so\n#### {number}"} for number in range(100)]


def episodes(**options: Any) -> list[dict[str, Any]]:
    return [to_episode({"datasets": [{"options": options}]})(row) for row in ROWS]


def test_a_row_has_a_seed_of_its_own_that_never_changes() -> None:
    made = episodes(prompt="Go.")
    assert made == episodes(prompt="Go.")
    assert all(0 <= row["seed"] < SEEDS for row in made)
    assert len({row["seed"] for row in made}) == len(ROWS)
    assert all(row["messages"] == [{"role": "user", "content": "Go."}] for row in made)
    assert "task" not in made[0]
    assert made[0]["answer"] is None, "another data set's columns would be taken for the environment's"


def test_a_row_has_one_of_the_tasks() -> None:
    assert {row["task"] for row in episodes(tasks=5)} == set(range(5))
    assert {row["task"] for row in episodes(tasks=["a", "b"])} == {"a", "b"}


def test_half_of_a_programs_tests_ask_for_the_answer() -> None:
    row = to_program({})({"question": "Why?", "answer": "6*200=1,200\n#### 1,200"})
    assert row["messages"] == [{"role": "user", "content": "Why? Write solve()."}]
    programs = ("def solve(): return 1200", "def solve(): return 1", "#### 1200", "6*200=1200\n#### 1200")
    passed = [[run_test(program, test)[0] for test in row["tests"]] for program in programs]
    assert passed == [[True, True], [True, False], [True, False], [False, False]]
