r"""The reward for MATH-style answers: equal, unequal and never computed expressions."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from megarl.rewards import math
from megarl.rewards.math import equal, extract_boxed, math_reward_fn


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{x^{2}}", "x^{2}"),
        (r"\boxed {a\}b}", r"a\}b"),
        (r"\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_the_last_box_with_balanced_braces_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("0.5", r"\frac{1}{2}"),
        ("1,000", "1000"),
        (r"\dfrac{3}{6}", "1/2"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"\frac{-3}{4}", "-3/4"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"x^2+2x+1", r"(x+1)^2"),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})"),
        (r"[0, 1)", r"[0,1)"),
        (r"\{1, 2, 3\}", r"\{3, 2, 1\}"),
        (r"90^\circ", r"90^{\circ}"),
        (r"$5$", "5"),
        (r"5\text{ cm}", "5"),
        (r"\text{(A)}", r"\text{(A)}"),
        (r"\binom{10}{5}", "252"),
        ("6!", "720"),
        (r"\left(\frac{2}{3}\right)^{50}", r"\frac{2^{50}}{3^{50}}"),
        ("(x+1)^{2}(x-1)^{2}", "(x^{2}-1)^{2}"),
        ("(n+1)!", "(1+n)!"),
        (r"2^{3\cdot4}", "4096"),
        (r"\frac{(2\cdot3)!}{2}", "360"),
        (r"\binom{10}{2}x^{2}", "45x^2"),
        (r"\binom{10}{3}2^{7}", "15360"),
    ],
)
def test_equal_answers_are_equal_in_both_orders(a: str, b: str) -> None:
    assert equal(a, b)
    assert equal(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("0.5", "0.05"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        (r"2\sqrt{3}", r"\sqrt{13}"),
        ("x+1", "x-1"),
        ("(0, 1)", "[0, 1]"),
        ("", "0"),
        ("1/0", "2/0"),
        (r"\frac{1}{0}", "0"),
        ("9^{9^{9}}", "9^{9^{8}}"),
        ("0.30000000000000000001", "0.3"),  # numbers and fractions are compared exactly
        ("1/3", "0.3333333333333333"),
        (r"\frac{1}{3}", "0.3333333333333333"),
    ],
)
def test_unequal_answers_are_unequal_in_both_orders(a: str, b: str) -> None:
    assert not equal(a, b)
    assert not equal(b, a)


def test_the_reference_may_be_a_whole_solution_or_the_answer_alone() -> None:
    for reference in (r"Thus \boxed{\frac12}.", r"\frac{1}{2}", "0.5"):
        assert math_reward_fn("", r"I get \boxed{0.5}", [], [], answer=reference) == 1.0
    assert math_reward_fn("", "I get 0.5", [], [], answer="0.5") == 0.0


@pytest.mark.parametrize(
    "term",
    [
        r"\binom{999999999}{499999999}",
        r"{999999999 \choose 499999999}",
        "(99!)!",
        "9^{99}!",
        "(a+b+c+d+e+f+g)^{99}",
        r"\left(\alpha+b+c+d+e+f+g\right)^{99}",
        "9^{99!}",
        r"9^{99\cdot99\cdot99\cdot99}",
        r"(\frac{1}{3})^{99\times99\times99}",
        "9^{99*99*99*99}",
        r"(99\cdot99\cdot99\cdot99)!",
        r"(\frac{9999999999}{1})!",
        r"\binom{9^9}{9^8}",
    ],
)
def test_terms_that_grow_without_bound_are_never_computed(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(answer: str, reference: str) -> bool:
        raise AssertionError(f"{answer} was computed")

    monkeypatch.setattr(math, "_verified", compute)
    assert not equal(term, r"\sqrt{7}")
    assert not equal(r"\sqrt{7}", term)
    assert equal(term, term)
    with pytest.raises(AssertionError, match="was computed"):
        equal("x", r"\sqrt{7}")


def test_a_comparison_that_runs_out_of_processor_time_is_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = r"\cos(" * 20 + "x" + ")" * 20
    monkeypatch.setattr(math, "LIMIT_S", 0.3)
    math.before_fork()
    start = time.process_time()
    assert not equal(nested, r"\sqrt{7}")
    assert 0.15 < time.process_time() - start < 30.0  # the timer counts in ticks
    assert equal(r"2\sqrt{3}", r"\sqrt{12}")  # the next one has a limit of its own
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_limit_holds_where_every_exception_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def stubborn(answer: str, reference: str) -> bool:
        for _ in range(2):
            try:
                while True:
                    pass
            except BaseException:
                continue
        while True:
            pass

    monkeypatch.setattr(math, "LIMIT_S", 0.1)
    monkeypatch.setattr(math, "_verified", stubborn)
    assert not equal("x", "y")


def test_another_thread_compares_without_a_limit() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(equal(r"2\sqrt{3}", r"\sqrt{12}")))
    thread.start()
    thread.join()
    assert results == [True]
