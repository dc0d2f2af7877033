"""Reward functions: `reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from types import MappingProxyType
from typing import Any

from megarl.knobs import UserError, function_of
from megarl.rewards.code import code_reward_fn
from megarl.rewards.gsm8k import gsm8k_reward_fn
from megarl.rewards.lists import ListReward, list_arguments
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
    """Looks up a name in `REWARDS`, or imports the user's `MODULE.FUNCTION`, also from the working folder.

    A function `f(completions, **columns) -> list[float]`, as in TRL and axolotl, is wrapped by `ListReward`.

    Raises:
        UserError: the name is unknown, the function cannot be imported, or takes no completions.
    """
    function = _function(name)
    if name in REWARDS:
        return function
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions written in C
        parameters = MappingProxyType({})
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "prompt_ids" not in parameters and "completions" not in parameters and not takes_any:
        raise UserError(
            f"rewards.functions: {name} is no reward function: it takes neither prompt_ids (one completion a call) nor "
            "completions (lists, as in TRL); see docs/adding_a_reward.md"
        )
    return function if "prompt_ids" in parameters else ListReward(function)


def check_columns(name: str, columns: Collection[str]) -> None:
    """Refuses a function that cannot be called with the columns of the data set.

    Raises:
        UserError: naming the parameter. Also see `reward_fn_of`.
    """
    reward_fn_of(name)
    function = _function(name)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C
        return
    try:
        if "prompt_ids" in signature.parameters:
            signature.bind("", "", [], [], **dict.fromkeys(columns))
        else:
            signature.bind(**list_arguments(set(signature.parameters), "", [""], [[]], dict.fromkeys(columns)))
    except TypeError as error:
        raise UserError(
            f"rewards.functions: {name} cannot be called with the data's columns {', '.join(sorted(columns))}: {error}"
            "; rename a column, give the parameter a default, or add **data"
        ) from error


def _function(name: str) -> RewardFn:
    """Looks up or imports a function as it was written."""
    if name in REWARDS:
        return REWARDS[name]
    if "." not in name:
        raise UserError(
            f"rewards.functions: {name} is none of {', '.join(REWARDS)}; a function of your own is MODULE.FUNCTION"
        )
    function: RewardFn = function_of(name, f"rewards.functions: {name}")
    return function
