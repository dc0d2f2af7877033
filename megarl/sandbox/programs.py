"""Tests the program in a model's answer, each test in a new sandbox.

A test is `{"input": ..., "output": ...}`, where the program reads stdin and writes stdout, or a statement such as
`assert add(1, 2) == 3`. A statement runs in a process of its own and calls the program in another one. So a program
cannot read it, answer for its comparison or end it (`megarl.sandbox.judge`).
"""

from __future__ import annotations

import re

from megarl.sandbox.client import SandboxResult, check_statement, run_python

TEST_LIMIT_S = 2.0  # processor time of one test
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def extract_code(text: str) -> str:
    """Returns the last fenced block of Python, or the whole text if there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def run_test(code: str, test: dict[str, str] | str, *, wall_limit_s: float | None = None) -> tuple[bool, SandboxResult]:
    """Runs one test: whether the program passes it, and the run. A program that ends before a statement fails it."""
    if isinstance(test, str):
        result = check_statement(code, test, time_limit_s=TEST_LIMIT_S, wall_limit_s=wall_limit_s)
        return result.ok, result
    result = run_python(code, test["input"], time_limit_s=TEST_LIMIT_S, wall_limit_s=wall_limit_s)
    return result.ok and result.stdout.split() == test["output"].split(), result
