r"""Reward for MATH-style problems: 1 if the answer in `\boxed{}` equals the reference mathematically, else 0.

This module compares numbers, fractions and equal text itself. Other answers are parsed as LaTeX and compared by
math-verify, which knows intervals, sets, matrices and simplification.

Model output is never evaluated as code: math-verify's parser of Python-like expressions is not used. Expressions that
could grow without bound (towers of powers, factorials, hundreds of signs) are compared as text only. Run the reward in
a `RewardPool`, whose time and memory limits are the second line of defence.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

MAX_ANSWER = 400  # characters; a longer answer is compared as text
MAX_COMPLETION = 200_000  # only the last characters are searched for the answer
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}|(-?[0-9]+)/(-?[0-9]+)")
_DECORATION = re.compile(r"\\(?:left|right|,|;|:|!| )|\\text\{[^{}]*\}$|\\(?:mathrm|mathbf|text)(?=\{)|\$|\\%|%|°|\s")
_UNBOUNDED = re.compile(
    r"\^[^{]*\^|\^\{[^}]*\^|\*\*.*\*\*|[0-9]{5,}!|!!|\^\{?-?[0-9]{3,}|[0-9]{40,}|__|\\(?:sum|prod|int)"
)
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
    from math_verify import LatexExtractionConfig, parse, verify  # imported late, as it takes a second

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
    """True if parsing and simplifying the answer cannot take unbounded time or memory."""
    return len(text) <= MAX_ANSWER and not _UNBOUNDED.search(text) and len(_SIGN.findall(text)) <= MAX_SIGNS


def math_reward_fn(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **data: Any
) -> float:
    r"""Returns 1.0 if the completion's last `\boxed{}` equals that of `answer`, or `answer` if it has no box."""
    boxed = extract_boxed(completions)
    if boxed is None:
        return 0.0
    return float(equal(boxed, extract_boxed(answer) or answer))
