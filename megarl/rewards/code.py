"""Reward for code: the fraction of unit tests that the completion's program passes, each in a new sandbox.

`tests` is a list of `{"input": ..., "output": ...}`, where the program reads stdin and writes stdout, or of statements
such as `assert add(1, 2) == 3`. A statement runs in a process of its own and calls the program in another one. So a
program cannot read it, answer for its comparison or end it (`megarl.sandbox.judge`). The program has no network, cannot
start a process and cannot write outside its folder (`megarl.sandbox`).
"""

from __future__ import annotations

from typing import Any

from megarl.sandbox.programs import TEST_LIMIT_S, extract_code, run_test

SAMPLE_LIMIT_S = 6.0  # processor time and sleep of all tests; those that are left then count as failed


def code_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    tests: list[dict[str, str] | str],
    **data: Any,
) -> float:
    """Returns the fraction of `tests` that pass, 0.0 to 1.0.

    Raises:
        TimeoutError: the machine was too busy to give a test its processor time. The sample is left out, not scored 0.
        SandboxError: this machine cannot isolate code.
    """
    code = extract_code(completions)
    passed, used_s = 0, 0.0
    for test in tests:
        if used_s >= SAMPLE_LIMIT_S:
            break
        ok, result = run_test(code, test)
        if result.status == "wall":
            raise TimeoutError(
                f"a test had {result.cpu_s:.1f} of {TEST_LIMIT_S:g} s of processor time when its wall time ended; the "
                "sample is left out: the machine is too busy"
            )
        passed, used_s = passed + ok, used_s + result.cpu_s + result.sleep_s
    return passed / len(tests)
