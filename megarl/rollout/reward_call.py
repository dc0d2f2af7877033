"""Calls reward functions for workflows: any kind of function, with a failure that costs one sample and is counted."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from megarl.knobs import visible
from megarl.types import RewardError

logger = logging.getLogger(__name__)
_warning = threading.Lock()

# Causes of the failures of the episode that runs in this context.
causes: ContextVar[list[str]] = ContextVar("causes", default=[])  # noqa: B039 (run_episode sets a list of its own)

RewardFn = Callable[
    ..., Any
]  # (prompt, completions, prompt_ids, completion_ids, **data) -> float, or an awaitable of one


async def call_reward(
    reward_fn: RewardFn,
    prompt: str,
    prompt_ids: list[int],
    completions: Sequence[str],
    completion_ids: Sequence[list[int]],
    data: Mapping[str, Any],
) -> list[float | RewardError]:
    """Scores every completion of a prompt. A completion that fails to be scored gets a `RewardError`, never a 0.

    A sync function runs in a thread, one call of the thread pool for all completions: a slow one then delays neither
    other episodes nor their requests. For a time limit, and processes that survive a crash, use `RewardPool`.
    A function with `takes_lists` scores all completions at once.
    """
    if getattr(reward_fn, "takes_lists", False):
        return await _call_with_lists(reward_fn, prompt, prompt_ids, completions, completion_ids, data)
    samples = list(zip(completions, completion_ids, strict=True))
    if is_async(reward_fn):

        async def score(text: str, ids: list[int]) -> float | RewardError:
            try:
                return _number(await reward_fn(prompt, text, prompt_ids, ids, **data))
            except Exception as error:  # costs the sample, not the run: masked and counted
                return _failure(reward_fn, error)

        return list(await asyncio.gather(*(score(text, ids) for text, ids in samples)))

    def score_all() -> list[float | RewardError]:
        rewards: list[float | RewardError] = []
        for text, ids in samples:
            try:
                rewards.append(_number(reward_fn(prompt, text, prompt_ids, ids, **data)))
            except Exception as error:  # costs the sample, not the run: masked and counted
                rewards.append(_failure(reward_fn, error))
        return rewards

    return await asyncio.to_thread(score_all)


async def _call_with_lists(
    reward_fn: Any,
    prompt: str,
    prompt_ids: list[int],
    completions: Sequence[str],
    completion_ids: Sequence[list[int]],
    data: Mapping[str, Any],
) -> list[float | RewardError]:
    """Has `reward_fn.score_group` score all completions. If it raises, each of them has failed."""
    arguments = (prompt, prompt_ids, completions, completion_ids, data)
    try:
        if is_async(reward_fn.score_group):
            values = await reward_fn.score_group(*arguments)
        else:
            values = await asyncio.to_thread(lambda: reward_fn.score_group(*arguments))
        return [_failure(reward_fn, v) if isinstance(v, RewardError) else _number(v) for v in values]
    except Exception as error:  # costs the prompt's samples, not the run: masked and counted
        return [_failure(reward_fn, error)] * len(completions)


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call gives an awaitable: a coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"it returned the text {value[:60]!r}; return a number, such as float() of it")
    if not math.isfinite(float(value)):
        raise TypeError(f"the reward is {value!r}, which is no finite number")
    return value if isinstance(value, float) else float(value)


def _failure(reward_fn: RewardFn, error: Exception) -> RewardError:
    """A function's failure, kept for the episode."""
    return failure_of(getattr(reward_fn, "__name__", type(reward_fn).__name__), error)


def failure_of(name: str, error: Exception) -> RewardError:
    """Keeps a failure's cause for the episode, and warns of it once. `name` names the failing part."""
    failure = error
    if not isinstance(failure, RewardError):
        failure = RewardError(visible(f"{name} failed, {type(error).__name__}: {error}"))
    causes.get().append(str(failure))
    with _warning:  # two threads at once would both miss in the cache
        _warn_once(str(failure))
    return failure


@functools.lru_cache(maxsize=1000)
def _warn_once(cause: str) -> None:
    logger.warning("a sample without a reward is left out: %s; further ones of this cause are counted alone", cause)
