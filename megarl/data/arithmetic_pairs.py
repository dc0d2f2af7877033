"""Bundled preference data: problems of the bundled task with a right and a wrong answer.

A wrong answer has the layout of the right one, but one of its two steps is off by one. A pair is
`{messages, chosen, rejected}`, the format `chat_template.default`. A judged completion is
`{prompt, completion, label}`, the format `user_defined.default` of KTO. Half of the judged completions are right, and
`label` is true for them.
"""

from __future__ import annotations

import random
from typing import Any

from megarl.data.arithmetic import Sum, answer_of, question_of, split_sums

PAIRS = {"train": 2048, "test": 128}


def wrong_answer_of(s: Sum, rng: random.Random) -> str:
    """Writes the answer with one of its two steps off by one, up or down. No number is negative."""
    slip1, slip2 = rng.choice([(1, 0), (-1, 0), (0, 1), (0, -1)])
    middle = s.middle + slip1
    result = (middle + s.c if s.op2 == "+" else middle - s.c) + slip2
    if middle < 0 or result < 0:
        return wrong_answer_of(s, rng)
    return f"{s.a}{s.op1}{s.b}={middle}\n{middle}{s.op2}{s.c}={result}\n#### {result}"


def generate_pairs(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Generates the pairs of `split` ("train" or "test"). Deterministic in `seed`; the splits share no sum."""
    return [
        {
            "messages": [{"role": "user", "content": question}],
            "chosen": {"role": "assistant", "content": right},
            "rejected": {"role": "assistant", "content": wrong},
        }
        for question, right, wrong in _problems(split, seed)
    ]


def generate_judged(split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Generates one completion per problem, right and wrong in turn."""
    return [
        {"prompt": question, "completion": right if i % 2 == 0 else wrong, "label": i % 2 == 0}
        for i, (question, right, wrong) in enumerate(_problems(split, seed))
    ]


def _problems(split: str, seed: int) -> list[tuple[str, str, str]]:
    sums = split_sums(seed)[split == "test"]
    rng = random.Random(f"pairs {split} {seed}")
    sampled = [sums[rng.randrange(len(sums))] for _ in range(PAIRS[split])]
    return [(question_of(s, rng), answer_of(s), wrong_answer_of(s, rng)) for s in sampled]
