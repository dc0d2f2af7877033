r"""Reward for MATH-style problems: 1 if the answer in `\boxed{}` equals the reference mathematically, else 0.

This module compares numbers, fractions and equal text itself. Other answers are parsed as LaTeX and compared by
math-verify, which knows intervals, sets, matrices and simplification.

Model output is never evaluated as code: math-verify's parser of Python-like expressions is not used. Expressions that
could grow without bound (towers of powers, factorials of powers, hundreds of signs) are compared as text only.
Other comparisons that take more than `LIMIT_S` of processor time count as unequal. A `RewardPool` limits memory, and
wall time for one long operation that Python cannot interrupt.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_ANSWER = 400  # characters; a longer answer is compared as text
LIMIT_S = 2.0  # processor time of one comparison
MAX_COMPLETION = 200_000  # only the last characters are searched for the answer
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}|(-?[0-9]+)/(-?[0-9]+)")
_DECORATION = re.compile(r"\\(?:left|right|,|;|:|!| )|\\text\{[^{}]*\}$|\\(?:mathrm|mathbf|text)(?=\{)|\$|\\%|%|°|\s")
_UNBOUNDED = re.compile(
    r"\^[^{]*\^|\^\{[^}]*\^|\*\*.*\*\*|[0-9]{5,}!|!!|\^\{?-?[0-9]{3,}|[0-9]{40,}|__|\\(?:sum|prod|int)"
    r"|[!^].*[)}\]]!"  # the factorial of a factorial or power
    r"|[0-9]{5,}[^+-]*[)}]!|(?:[0-9]{2,}(?:\\cdot|\\times|\*)){2}[^+-]*[)}]!"  # or of a large number or product
    r"|\^\{[^}]*(?:[0-9]{2,}!|(?:[0-9]{2,}(?:\\cdot|\\times|\*)){2})"  # such an exponent
    r"|binom\{[^{}]*(?:\}\{[^{}]*)?\^|binom\{?[0-9]{6,}|choose[^0-9]*[0-9]{6,}|[0-9]{6,}\\choose"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_POWER_OF_SUM = re.compile(r"\([^()]*[a-zA-Z][^()]*\)\^\{?(?:[2-9][0-9]|[0-9]{3})")  # has thousands of terms
_SIGN = re.compile(r"\\[a-zA-Z]+|[-+*/^_!(){}\[\]]")
MAX_SIGNS = 80


def extract_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, or None if there is none or its braces do not balance."""
    text = text[-MAX_COMPLETION:]
    starts = list(_BOXED.finditer(text))
    if not starts:
        return None
    begin, depth = starts[-1].end(), 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[begin : brace.start()]
    return None


def equal(answer: str, reference: str) -> bool:
    """True if two LaTeX answers are mathematically equal."""
    a, b = _plain(answer), _plain(reference)
    if a == b:
        return True
    exact_a, exact_b = _rational(a), _rational(b)
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b
    if not (_bounded(a) and _bounded(b)):
        return False
    return _within(LIMIT_S, lambda: _verified(answer=a, reference=b))


def before_fork() -> None:
    """Imports math-verify, which takes most of a second; `RewardPool` calls it once for all workers."""
    _verified(r"\sqrt{2}", r"\sqrt{8}")


class _OutOfTimeError(BaseException):
    """Raised at the limit of processor time. A BaseException, as sympy catches every Exception in places."""


def _within(limit_s: float, compare: Callable[[], bool]) -> bool:
    """Runs `compare` for at most `limit_s` of this process's processor time, then returns False.

    Only the main thread can be interrupted, and a worker of `RewardPool` scores there; other threads have no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return compare()

    def interrupt(*_: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGPROF, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, limit_s, 0.1)  # again, if a handler in between swallowed it
            return compare()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTimeError:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return False
    finally:
        signal.signal(signal.SIGPROF, signal.SIG_IGN)


def _verified(answer: str, reference: str) -> bool:
    """True if math-verify finds two LaTeX expressions equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]
    parsed = [
        parse(f"${text}$", extraction_config=latex, parsing_timeout=None, raise_on_error=False)
        for text in (reference, answer)
    ]
    return bool(parsed[0] and parsed[1] and verify(*parsed, timeout_seconds=None, raise_on_error=False))


def _plain(text: str) -> str:
    """Removes spaces, size and font commands, trailing text such as units, and the signs $, % and °."""
    return _DECORATION.sub("", text.strip().rstrip("."))


def _rational(text: str) -> Fraction | None:
    """Parses a number or a fraction of integers exactly, or returns None."""
    if len(text) > 60:
        return None
    if text and text not in "+-" and _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, top, bottom = (match[1], match[2], match[3]) if match[2] else ("", match[4], match[5])
    return Fraction(int(f"{sign}1") * int(top), int(bottom)) if int(bottom) else None


def _bounded(text: str) -> bool:
    """True if parsing and simplifying the answer cannot grow without bound, as far as its text tells."""
    if len(text) > MAX_ANSWER or len(_SIGN.findall(text)) > MAX_SIGNS:
        return False
    return not (_UNBOUNDED.search(text) or _POWER_OF_SUM.search(_COMMAND.sub("", text)))


def math_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any
) -> float:
    r"""Returns 1.0 if the completion's last `\boxed{}` equals that of `answer`, or `answer` if it has no box."""
    boxed = extract_boxed(completions)
    if boxed is None:
        return 0.0
    return float(equal(boxed, extract_boxed(answer) or answer))
