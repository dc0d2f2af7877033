"""Random hostile completions: every bundled reward gives 0 or 1, or for code a fraction, within its limits."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards import REWARDS
from megarl.rewards.answers import answer_of
from megarl.rewards.code import code_reward_fn
from megarl.rewards.pool import RewardConfig, RewardPool
from tests.fuzzing import fuzzed

NAMES = [name for name in REWARDS if name != "code"]
ANSWERS = [r"\boxed{7} #### 7", r"\boxed{\frac{x+1}{2}} #### 1,234.50", r"\boxed{(1, 2] \cup \{3\}} #### -0.5"]
PIECES = [
    "\\boxed{", "\\fbox {", "}", "{", "\\", "#### ", "####", "$", "-", "−", "+", "7", "1,234", "1,2", ".5", "12/5",
    "9" * 39, "9" * 5000, "^", "^{", "_", "_{", "!", "*", "**", "=", "<", "(", ")", "[", "]", ",", "|", "x", "\\pi",
    "\\frac{1}{2}", "\\frac", "\\sqrt[3]{2}", "\\sqrt", "\\binom{9}{4}", "\\log", "\\sin", "\\lim_{x\\to0}", "\\infty",
    "\\cup", "\\begin{pmatrix}1&2\\end{pmatrix}", "\\left(", "\\right)", "\\text{cm}", "%", "°", "e", "i", "\\in",
    "<think>", "</think>", "<answer>", "</answer>", "```python\n", "```", "\0", "\n", "\u2028", "\ud800", "\u202e",
    "\u0663", "\U0001d7db", "é", "__import__('os')", "{x}" * 2000,
    "\\boxed{" * 2000, "((" * 2000, "<think>" * 2000, "1/0", "\\frac{1}{0}",
]  # fmt: skip
SOUPS = st.lists(st.one_of(st.sampled_from(PIECES), st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map(
    "".join
)
COMPLETIONS = st.one_of(SOUPS, SOUPS.map(lambda soup: f"so \\boxed{{{soup}}}"), SOUPS.map(lambda soup: f"#### {soup}"))
PROGRAMS = st.lists(
    st.sampled_from(
        ["print(7)\n", "while True: pass\n", "raise SystemExit\n", "(" * 300 + "\n", "\0\n", "\ud800\n", "x = 'é\n",
         "import os; os.kill(os.getppid(), 9)\n", "print('7' * 10**8)\n", "[0] * 10**11\n", "def f(): f()\nf()\n",
         "open('/etc/passwd', 'w')\n", "import socket; socket.socket()\n", "input()\n", "```", "```python\n"]
    ),
    max_size=4,
).map("".join)  # fmt: skip


@fuzzed(bounded=40, long=5_000)
def test_every_reward_judges_random_completions(effort: Any) -> None:
    @effort
    @given(st.lists(st.tuples(COMPLETIONS, st.sampled_from(ANSWERS)), min_size=1, max_size=4))
    def holds(cases: list[tuple[str, str]]) -> None:
        async def scores() -> list[Any]:
            calls = (pool.score("", completion, [], [], answer=answer) for completion, answer in cases)
            return await asyncio.gather(*calls)

        for values in loop.run(scores()):
            assert set(values) <= {0.0, 1.0}
        for completion, _ in cases:
            assert isinstance(answer_of(completion), str)

    functions = [REWARDS[name] for name in NAMES]
    with asyncio.Runner() as loop, RewardPool(functions, RewardConfig(time_limit_s=120.0)) as pool:
        holds()


@fuzzed(bounded=300, long=20_000)
def test_the_right_answer_after_any_text_is_right(effort: Any) -> None:
    @effort
    @given(COMPLETIONS)
    def holds(text: str) -> None:
        right = text + "\n#### 7 \\boxed{7}"
        for name in NAMES:
            if name != "think_format":
                answer = right if name == "exact_match" else ANSWERS[0]
                assert REWARDS[name]("", right, [], [], answer=answer) == 1.0

    holds()


@fuzzed(bounded=20, long=300)
def test_the_fraction_of_tests_that_a_random_program_passes(effort: Any) -> None:

    @effort
    @given(PROGRAMS)
    def holds(program: str) -> None:
        value = code_reward_fn("", program, [], [], tests=[{"input": "", "output": "7"}])
        assert value in (0.0, 1.0)

    holds()
