"""The reward for code: unit tests that run in the sandbox."""

from __future__ import annotations

import pytest

from megarl.rewards.code import code_reward_fn, extract_code

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ECHO = "```python\nprint(int(input()) * 2)\n```"


def test_the_last_block_of_python_is_the_program() -> None:
    assert extract_code("```python\na\n```\n```py\nb\n```") == "b\n"
    assert extract_code("print(1)") == "print(1)"


def test_the_reward_is_the_fraction_of_tests_that_pass() -> None:
    tests: list[dict[str, str] | str] = [
        "assert add(1, 2) == 3",
        "assert add(1, 1) == 3",
        "assert add('a', 'b') == 'ab'",
    ]
    assert code_reward_fn("", ADD, [], [], tests=tests) == pytest.approx(2 / 3)


def test_programs_may_read_stdin_and_write_stdout() -> None:
    tests: list[dict[str, str] | str] = [{"input": "4", "output": "8\n"}, {"input": "5", "output": "11"}]
    assert code_reward_fn("", ECHO, [], [], tests=tests) == 0.5


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def add(a, b): exit()",
        "while True: pass",
        "(",
    ],
)
def test_a_program_that_exits_early_does_not_pass(code: str) -> None:
    assert code_reward_fn("", f"```python\n{code}\n```", [], [], tests=["assert add(1, 2) == 3"]) == 0.0
