"""The reward of code: the share of unit tests that the completion's program passes, each in a sandbox of its own.

`tests` is a list of `{"input": ..., "output": ...}` (the program reads stdin and writes stdout) or of statements such
as `assert add(1, 2) == 3`, run after the program. The program has no network, starts no process and writes no file
outside its folder; see `megarl.sandbox`.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from megarl.sandbox import run_python

TEST_LIMIT_S = 2.0
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def extract_code(text: str) -> str:
    """The last fenced block of Python, or the whole text where there is none."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def passes(code: str, test: dict[str, str] | str, time_limit_s: float = TEST_LIMIT_S) -> bool:
    """Whether the program passes one test. A statement has to be reached: leaving early is no pass."""
    if isinstance(test, str):
        word = secrets.token_hex(16)
        done = run_python(f"{code}\n{test}\nprint({word!r}, end='')", time_limit_s=time_limit_s)
        return done.ok and done.stdout.endswith(word)
    done = run_python(code, test["input"], time_limit_s=time_limit_s)
    return done.ok and done.stdout.split() == test["output"].split()


def code_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    tests: list[dict[str, str] | str],
    **data: Any,
) -> float:
    """The share of `tests` that pass, 0.0 to 1.0."""
    code = extract_code(completions)
    return sum(passes(code, test) for test in tests) / len(tests)
