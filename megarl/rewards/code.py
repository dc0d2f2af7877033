"""Reward for code: the fraction of unit tests that the completion's program passes, each in a new sandbox.

`tests` is a list of `{"input": ..., "output": ...}`, where the program reads stdin and writes stdout, or of statements
such as `assert add(1, 2) == 3`, which run after the program. The program has no network, cannot start a process and
cannot write outside its folder; see `megarl.sandbox`.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from megarl.sandbox import run_python

TEST_LIMIT_S = 2.0
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def extract_code(text: str) -> str:
    """Returns the last fenced block of Python, or the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def passes(code: str, test: dict[str, str] | str) -> bool:
    """True if the program passes one test. A program that exits before the test's statement does not pass."""
    if isinstance(test, str):
        end_marker = secrets.token_hex(16)  # printed last: a program that exits early lacks it
        result = run_python(f"{code}\n{test}\nprint({end_marker!r}, end='')", time_limit_s=TEST_LIMIT_S)
        return result.ok and result.stdout.endswith(end_marker)
    result = run_python(code, test["input"], time_limit_s=TEST_LIMIT_S)
    return result.ok and result.stdout.split() == test["output"].split()


def code_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    tests: list[dict[str, str] | str],
    **data: Any,
) -> float:
    """Returns the fraction of `tests` that pass, 0.0 to 1.0."""
    code = extract_code(completions)
    return sum(passes(code, test) for test in tests) / len(tests)
