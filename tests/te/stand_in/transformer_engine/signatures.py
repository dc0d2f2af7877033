"""Signatures of the real package, by which the stand-in takes its arguments."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORD = json.loads((Path(__file__).parents[2] / "transformer_engine.json").read_text())


def taken(name: str, computed: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SimpleNamespace:
    """Binds arguments by the real signature of `name`, with its defaults.

    `computed` names the parameters that the stand-in heeds, separated by spaces.

    Raises:
        TypeError: the real function does not take these arguments.
        NotImplementedError: an argument that the stand-in does not heed differs from its default.
    """
    parameters = [
        inspect.Parameter(
            p["name"], inspect._ParameterKind[p["kind"]], default=p.get("default", inspect.Parameter.empty)
        )
        for p in RECORD["signatures"][name]
    ]
    bound = inspect.Signature(parameters).bind(*args, **kwargs)
    heeded = set(computed.split())
    assert heeded <= {p.name for p in parameters}, f"{name} has no such parameter: {heeded}"
    for parameter in parameters:
        value = bound.arguments.get(parameter.name, parameter.default)
        if parameter.name not in heeded and not (value is parameter.default or value == parameter.default):
            raise NotImplementedError(f"the stand-in of Transformer Engine lacks {name}({parameter.name}={value!r})")
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)
