"""Code in the sandbox: the policy writes a program, reads which test fails, and writes it again.

A row has `tests`, as `megarl.sandbox.programs.run_test` takes them. The last answer's fraction of passed tests is the
episode's reward.
"""

from __future__ import annotations

from typing import Any

from megarl.environments.base import Environment, Step
from megarl.knobs import MAX_SECONDS
from megarl.sandbox import run_python
from megarl.sandbox.programs import extract_code, run_test

MAX_OUTPUT = 1000  # characters of a failing program's output


def require() -> None:
    """Needs no package."""


def build(good_enough: float, show_tests: bool) -> Environment:
    """An environment whose episodes end when `good_enough` of the tests pass."""
    run_python("")  # raises where this machine cannot isolate code
    return _Code(good_enough, show_tests)


class _Code(Environment):
    def __init__(self, good_enough: float, show_tests: bool) -> None:
        self.good_enough = good_enough
        self.show_tests = show_tests
        self.tests: list[Any] = []
        self.given = 0.0  # rewards so far

    def reset(self, row: dict[str, Any]) -> None:
        self.tests, self.given = row["tests"], 0.0
        if not self.tests:
            raise ValueError("the row's column tests is empty")

    def step(self, answer: str) -> Step:
        code, passed, report = extract_code(answer), 0, ""
        for test in self.tests:
            ok, result = run_test(code, test, wall_limit_s=MAX_SECONDS)  # the call's own limit ends it earlier
            passed += ok
            if not ok and not report:
                wrote = (result.stderr or result.stdout).strip()[-MAX_OUTPUT:]
                shown = f"{test!r} fails" if self.show_tests else "A test fails"
                report = f"{shown} ({result.status}): {wrote}"
        fraction = passed / len(self.tests)
        reward, self.given = fraction - self.given, fraction  # the sum of an episode is its last fraction
        return Step(f"{report}\nWrite the whole program again.", reward, fraction >= self.good_enough)
