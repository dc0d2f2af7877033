"""How a configuration knob is declared: a dataclass field that carries one line of meaning.

Every knob has one owner, a frozen dataclass beside the code that reads it. `docs/configuration.md` is
generated from these lines.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any


class UserError(ValueError):
    """A mistake the user can mend. One line: the value, the rule, the remedy. The commands exit with 2."""


def knob(default: Any = MISSING, meaning: str = "", *, factory: Any = MISSING) -> Any:
    """A dataclass field with a default (or a `factory` of one) and one line of meaning."""
    metadata = {"meaning": meaning}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def function_of(name: str, what: str) -> Callable[..., Any]:
    """The function `MODULE.FUNCTION` in a module that Python finds from the working folder; `what` names it in errors.

    Raises:
        UserError: there is no such function.
    """
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UserError(f"{what} must be MODULE.FUNCTION of your own")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{what} cannot be imported from {os.getcwd()}: {error}") from error
    if not callable(function):
        raise UserError(f"{what} is a {type(function).__name__}, not a function")
    return function


def override(path: str, value: Any) -> str:
    """`path=value` in the grammar of the command line's overrides."""
    return f"{path}={_quoted(value)}"


def _quoted(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_quoted(inner) for inner in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{escaped}'"
    return json.dumps(value)
