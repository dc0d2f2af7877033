"""The bundled preferences: problems of the bundled task with a right and a wrong answer.

A wrong answer is laid out as the right one and slips by one in one of its two steps. A pair is
`{messages, chosen, rejected}` (the format `chat_template.default`), a judged completion `{prompt, completion, label}`
(`user_defined.default` for KTO): half of them right, `label` says which.
"""

from __future__ import annotations

import random
from typing import Any

from megarl.data.arithmetic import Sum, answer_of, question_of, split_sums

PAIRS = {"train": 2048, "test": 128}


def wrong_answer_of(s: Sum, rng: random.Random) -> str:
    """The two steps and a result that is off by one, from a slip in one of them."""
    first, second = rng.choice([(1, 0), (-1, 0), (0, 1), (0, -1)])
    middle = s.middle + first
    result = (middle + s.c if s.op2 == "+" else middle - s.c) + second
    if middle < 0 or result < 0:
        return wrong_answer_of(s, rng)
    return f"{s.a}{s.op1}{s.b}={middle}\n{middle}{s.op2}{s.c}={result}\n#### {result}"


def generate_pairs(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """The pairs of `split` ("train" or "test"), the same for the same seed; sums of the test split are in no other."""
    return [
        {
            "messages": [{"role": "user", "content": question}],
            "chosen": {"role": "assistant", "content": right},
            "rejected": {"role": "assistant", "content": wrong},
        }
        for question, right, wrong in _problems(split, seed)
    ]


def generate_judged(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """One completion a problem, in turn right and wrong."""
    return [
        {"prompt": question, "completion": right if i % 2 == 0 else wrong, "label": i % 2 == 0}
        for i, (question, right, wrong) in enumerate(_problems(split, seed))
    ]


def _problems(split: str, seed: int) -> list[tuple[str, str, str]]:
    sums = split_sums(seed)[split == "test"]
    rng = random.Random(f"pairs {split} {seed}")
    chosen = [sums[rng.randrange(len(sums))] for _ in range(PAIRS[split])]
    return [(question_of(s, rng), answer_of(s), wrong_answer_of(s, rng)) for s in chosen]
