"""Reward for GSM8K: 1 if the number after `####` equals the reference's, else 0."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from megarl.knobs import UserError

# 1234, 1,234, 12.50 or .5. The atomic group matches a whole number or nothing. A number is therefore never cut short
# (12/5, 1.2.3 and 1,2 do not match), and matching is linear in the length of the text.
_NUMBER = r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?![.,]?[0-9]|[\w/])"
_MARKED = re.compile(r"####[ \t]*+\$?([-+−]?)\$?(" + _NUMBER + ")")
_ANYWHERE = re.compile(r"(?<!\w)(?<![0-9][.,/])(?:(?<![\w)])([-+−]))?\$?(" + _NUMBER + ")")
MAX_TEXT = 200_000  # only the last characters are searched
_BOXED = "\\boxed{"


def _normalised(sign: str | None, digits: str) -> str:
    """Normalizes the spelling of a number: no comma, plus sign or redundant zeros; `-0` becomes `0`."""
    whole, _, fraction = digits.replace(",", "").partition(".")
    fraction = fraction.rstrip("0")
    number = (whole.lstrip("0") or "0") + ("." + fraction if fraction else "")
    return "-" + number if sign in ("-", "−") and number != "0" else number


def _last(matches: list[tuple[str, str]]) -> str | None:
    return _normalised(*matches[-1]) if matches else None


def _boxed_number(text: str) -> str | None:
    r"""Returns the number in the last `\boxed{...}` if it holds exactly one, else None."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            content = text[start : brace.start()].replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
            numbers = _ANYWHERE.findall(content.replace("\\", " \\"))
            return _last(numbers) if len(numbers) == 1 else None
    return None


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    r"""Extracts the final number of a solution, in normalized spelling ("1,234.50" -> "1234.5"), or None.

    `strict` takes the last `#### N`. `flexible` falls back to the last `\boxed{...}`, and without a box to the last
    number in the text. A box that does not hold exactly one number gives None.

    Raises:
        UserError: `method` is unknown.
    """
    if method not in ("strict", "flexible"):
        raise UserError(f"extraction method {method!r} is unknown; use 'strict' or 'flexible'")
    solution_str = solution_str[-MAX_TEXT:]
    number = _last(_MARKED.findall(solution_str))
    if number is not None or method == "strict":
        return number
    if _BOXED in solution_str:
        return _boxed_number(solution_str)
    return _last(_ANYWHERE.findall(solution_str))


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    answer: str,
    method: Literal["strict", "flexible"] = "strict",
    **kwargs: Any,
) -> float:
    r"""Returns 1.0 if the completion's number equals that of `answer` (GSM8K's column, ending in `#### N`), else 0.0.

    By default the completion must contain `#### N` too. `functools.partial(gsm8k_reward_fn, method="flexible")` also
    accepts `\boxed{N}` or the last number, for models that never saw GSM8K's format.

    Raises:
        UserError: the reference itself has no `#### N`.
    """
    reference = extract_solution(answer)
    if reference is None:
        raise UserError(f"the reference answer {answer[-60:]!r} does not end in '#### N'; no completion can match it")
    return float(extract_solution(completions, method) == reference)
