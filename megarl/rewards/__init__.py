"""What judges completions: `reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megarl.knobs import UserError, function_of
from megarl.rewards.code import code_reward_fn
from megarl.rewards.gsm8k import gsm8k_reward_fn
from megarl.rewards.math import math_reward_fn
from megarl.rewards.text import exact_match_reward_fn, think_format_reward_fn

RewardFn = Callable[..., Any]

REWARDS: dict[str, RewardFn] = {
    "gsm8k": gsm8k_reward_fn,
    "gsm8k_flexible": functools.partial(gsm8k_reward_fn, method="flexible"),
    "math": math_reward_fn,
    "exact_match": exact_match_reward_fn,
    "think_format": think_format_reward_fn,
    "code": code_reward_fn,
}


def reward_fn_of(name: str) -> RewardFn:
    """The reward function of a name in `REWARDS`, or of `MODULE.FUNCTION` in a module that Python finds from here.

    A function `f(completions, **columns) -> list[float]`, as TRL and axolotl have them, is called with lists of one.

    Raises:
        UserError: there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name:
        raise UserError(f"rewards.functions: {name} is none of {', '.join(REWARDS)}; your own is MODULE.FUNCTION")
    function: RewardFn = function_of(name, f"rewards.functions: {name}")
    return function if "prompt_ids" in _parameters(function) else one_by_one(function)


def one_by_one(function: RewardFn) -> RewardFn:
    """A reward function of ours from `f(completions, **columns) -> list[float]`.

    It gets `prompts`, `completions`, `completion_ids` and every column as lists of one. A parameter that no column has,
    but whose singular one has (`answers` of `answer`), gets that column.
    """
    wanted = _parameters(function)

    def reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
        columns = {name: [value] for name, value in data.items()}
        for name in wanted:
            if name not in columns and name.endswith("s") and name[:-1] in columns:
                columns[name] = columns[name[:-1]]
        own = {"prompts": [prompt], "completion_ids": [completion_ids]}
        (value,) = function(completions=[completions], **{**own, **columns})
        return float(value)

    reward.__name__ = getattr(function, "__name__", "reward")
    return reward


def _parameters(function: RewardFn) -> set[str]:
    return set(inspect.signature(function).parameters)
