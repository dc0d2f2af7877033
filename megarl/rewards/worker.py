"""Scores completions in the processes of `RewardPool`, which `megarl.forks` starts."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import pickle
import socket
import sys
import time
from typing import Any

from megarl.forks import receive, send
from megarl.knobs import visible

SHARE_S = 0.02  # well below `pool.PATIENCE_S`, after which the parent gives the rest of a share to other workers


class FunctionError(Exception):
    """A reward function failed. Names it and the cause."""


class PickledRewards:
    """Reward functions, served to a `RewardPool` in processes of `megarl.forks`.

    A worker reads shares of pickled calls from the parent. It answers in JSON, as a function's return value must not be
    unpickled in the parent.
    """

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._functions: list[Any] = []

    def prepare(self) -> None:
        """Loads the functions, and what their modules import late."""
        logging.disable(logging.WARNING)  # math-verify warns that its time limits are off; the pool has its own
        self._functions = pickle.loads(self._pickled)
        for module in {getattr(getattr(function, "func", function), "__module__", "") for function in self._functions}:
            getattr(sys.modules.get(module), "before_fork", lambda: None)()

    def serve(self, connection: socket.socket) -> None:
        """Answers shares of calls, call by call, until the parent closes."""
        serve(connection, self._functions)


def score(functions: list[Any], call: dict[str, Any]) -> list[list[float | None] | str]:
    """Scores the completions of a call with every function.

    Returns for each completion the functions' values, None where a function does not apply, or the cause of a failure.
    A function of lists is called once; its failure is the failure of all completions.
    """
    results: list[list[float | None] | str] = []
    columns: list[list[float | FunctionError | None]] = [_column(function, call) for function in functions]
    for values in zip(*columns, strict=True):
        failures = [str(value) for value in values if isinstance(value, FunctionError)]
        results.append(failures[0] if failures else [v for v in values if not isinstance(v, FunctionError)])
    return results


def _column(function: Any, call: dict[str, Any]) -> list[float | FunctionError | None]:
    """Values of one function for the completions of a call, or its failures."""
    texts, ids = call["completions"], call["completion_ids"]
    if getattr(function, "takes_lists", False):
        try:
            values = function.score_group(call["prompt"], call["prompt_ids"], texts, ids, call["data"])
            return [_number(value) for value in values]
        except (Exception, SystemExit) as error:
            return [_failure(function, error)] * len(texts)
    column: list[float | FunctionError | None] = []
    for text, tokens in zip(texts, ids, strict=True):
        try:
            value = function(call["prompt"], text, call["prompt_ids"], tokens, **call["data"])
            column.append(_number(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value))
        except (Exception, SystemExit) as error:
            column.append(_failure(function, error))
    return column


def _number(value: Any) -> float | None:
    """Checks a value of a function. None stays: the function does not apply to the completion."""
    if value is None:
        return None
    if isinstance(value, str):
        raise TypeError(f"it returned the text {value[:60]!r}; return a number, such as float() of it")
    if not math.isfinite(number := float(value)):
        raise TypeError(f"it returned {value!r}, not a finite number")
    return number


def _failure(function: Any, error: BaseException) -> FunctionError:
    return FunctionError(visible(f"{_name(function)} failed, {type(error).__name__}: {error}"[:500]))


def _name(function: Any) -> str:
    """`MODULE.FUNCTION`, also of a partial function."""
    function = getattr(function, "func", function)
    name = getattr(function, "__name__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}.{name}".removeprefix("megarl.rewards.")


async def _awaited(value: Any) -> Any:
    return await value


def serve(connection: socket.socket, functions: list[Any]) -> None:
    """Answers shares of calls, call by call, until the parent closes. After SHARE_S, the rest of a share goes back."""
    while (message := receive(connection)) is not None:
        calls: list[bytes] = pickle.loads(message)
        share_end = time.monotonic() + SHARE_S
        for number, call in enumerate(calls, 1):
            answer: dict[str, Any] = {"results": score(functions, pickle.loads(call))}
            answer["more"] = number < len(calls) and time.monotonic() < share_end
            send(connection, json.dumps(answer).encode())
            if not answer["more"]:
                break
