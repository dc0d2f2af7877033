import functools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.knobs import UserError
from megarl.rewards.gsm8k import extract_solution, gsm8k_reward_fn


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7+1=8\n#### 8", "8"),
        ("####8", "8"),
        ("#### 1\n#### 2", "2"),
        ("#### 2\n#### none", "2"),
        ("#### 1,234", "1234"),
        ("#### 1,234,567.50", "1234567.5"),
        ("#### $18", "18"),
        ("#### -$18", "-18"),
        ("#### $-18", "-18"),
        ("#### −3", "-3"),
        ("#### +3", "3"),
        ("#### -0.00", "0"),
        ("#### 007", "7"),
        ("#### .5", "0.5"),
        ("#### 9.0", "9"),
        ("#### 100", "100"),
        ("#### 5.", "5"),
        ("#### 5, as said", "5"),
        ("#### 20%", "20"),
        ("#### 9 pens", "9"),
        ("####\t9<|endoftext|>", "9"),
        ("#### 12/5", None),
        ("#### 1.2.3", None),
        ("#### 1,2", None),
        ("#### 2e3", None),
        ("#### 9x", None),
        ("####\n9", None),
        ("#### ", None),
        ("#### ٣", None),
        ("### 9", None),
        ("The answer is 9.", None),
        ("\\boxed{9}", None),
        ("", None),
    ],
)
def test_strict_takes_the_last_marked_number(text: str, number: str | None) -> None:
    assert extract_solution(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 and #### 8 and 9", "8"),
        ("#### 8, \\boxed{9}", "8"),
        ("so \\boxed{9} of 10", "9"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\$1{,}234.50}", "1234.5"),
        ("\\boxed{18\\text{ dollars}}", "18"),
        ("\\boxed{{-5}}", "-5"),
        ("\\boxed{50\\%}", "50"),
        ("\\boxed{-\\$18}", "-18"),
        ("3 \\boxed{\\frac{1}{2}}", None),
        ("7 \\boxed{8", None),
        ("The answer is 42.", "42"),
        ("10-3", "3"),
        ("16 - 9 = 7", "7"),
        ("it is -7!", "-7"),
        ("x1 2nd 3", "3"),
        ("no number", None),
        ("3/4", None),
        ("1.2.3", None),
    ],
)
def test_flexible_falls_back_to_boxed_and_to_the_last_number(text: str, number: str | None) -> None:
    assert extract_solution(text, "flexible") == number


@given(st.integers(-(10**12), 10**12), st.text(max_size=30))
def test_every_integer_is_read_with_or_without_commas(value: int, before: str) -> None:
    for written in (f"{value}", f"{value:,}", f"{value:,}.00"):
        assert extract_solution(f"{before}\n#### {written}") == str(value)
        assert extract_solution(f"\\boxed{{{written}}}", "flexible") == str(value)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000, places=3))
def test_a_decimal_has_the_same_value_in_every_spelling(value: object) -> None:
    spelled = extract_solution(f"#### {value}")
    assert spelled is not None
    assert extract_solution(f"#### {value}00") == spelled == extract_solution(f"#### {spelled}")
    assert float(spelled) == float(str(value))


LIKELY = st.text(alphabet="#0123456789.,-+$ \n\\boxed{}/x%", max_size=80)


@given(st.one_of(st.text(), LIKELY))
def test_any_completion_gets_a_reward_of_zero_or_one(completion: str) -> None:
    for method in ("strict", "flexible"):
        assert gsm8k_reward_fn("", completion, [], [], answer="#### 4", method=method) in (0.0, 1.0)


@given(LIKELY)
def test_the_extracted_number_has_a_normalized_spelling(text: str) -> None:
    for method in ("strict", "flexible"):
        number = extract_solution(text, method)
        if number is not None:
            float(number)
            assert extract_solution(f"#### {number}") == number


@pytest.mark.parametrize(
    "text",
    ["#" * 400_000, "#### " * 80_000, "####" + " " * 400_000, "1" * 400_000 + "x", "1," * 200_000, "1.2" * 130_000,
     "\\boxed{" * 60_000, "\\boxed{" + "{" * 400_000, "####" + "9" * 400_000, "-$" * 200_000, "#### 1,111" * 40_000],
)  # fmt: skip
def test_hostile_text_takes_linear_time(text: str) -> None:
    start = time.process_time()
    extract_solution(text, "flexible")
    assert time.process_time() - start < 1.0


def reward(completion: str, answer: str) -> float:
    return gsm8k_reward_fn("p", completion, [1], [2], answer=answer, level=3)


def test_the_reward_compares_the_numbers_and_ignores_other_columns() -> None:
    assert reward("so\n#### 1234", "x\n#### 1,234") == 1.0
    assert reward("#### 1,234.0", "#### 1234") == 1.0
    assert reward("#### 1235", "#### 1234") == 0.0
    assert reward("1234", "#### 1234") == 0.0
    assert type(reward("#### 1", "#### 1")) is float


def test_the_flexible_method_is_selected_by_name() -> None:
    flexible = functools.partial(gsm8k_reward_fn, method="flexible")
    assert flexible("p", "\\boxed{18}", [], [], answer="#### 18") == 1.0
    assert flexible("p", "it is 17", [], [], answer="#### 18") == 0.0


def test_a_reference_without_a_number_and_an_unknown_method_are_refused() -> None:
    with pytest.raises(UserError, match="about four"):
        reward("#### 4", "about four")
    with pytest.raises(UserError, match="'loose'"):
        extract_solution("#### 4", "loose")  # type: ignore[arg-type]
