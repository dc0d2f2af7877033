"""Configuration knobs: dataclass fields that carry one line of meaning.

Every knob has one owner, a frozen dataclass next to the code that reads it. `docs/configuration.md` is generated from
the lines of meaning.
"""

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, field
from typing import Any, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A mistake that the user can fix, in one line: the value, the rule, the remedy. The commands exit with 2."""


def does_not_exist(what: str, name: str, names: Sequence[str]) -> str:
    """Text of an error about an unknown choice: `what` with its value, the nearest of `names`, then all of them."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{what} does not exist; {hint}there are: {', '.join(names)}"


def run_all(checks: Iterable[Callable[[], object]]) -> None:
    """Runs checks in order.

    Raises:
        UserError: from the first that fails.
    """
    for check in checks:
        check()


def knob(default: Any = MISSING, meaning: str = "", *, factory: Any = MISSING) -> Any:
    """Declares a dataclass field with a default (or a default `factory`) and one line of meaning."""
    metadata = {"meaning": meaning}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def function_of(name: str, what: str) -> Callable[..., Any]:
    """Imports the user's function `MODULE.FUNCTION`. The module may lie in the working folder.

    Args:
        name: `MODULE.FUNCTION`.
        what: Names the setting in error messages.

    Raises:
        UserError: `name` has no module part, the import fails, or the attribute is not callable.
    """
    function: Callable[..., Any] = _imported(name, what, "FUNCTION")
    if not callable(function):
        raise UserError(f"{what} is a {type(function).__name__}, not a function")
    return function


def class_of(name: str, what: str, base: type[T]) -> type[T]:
    """Imports the user's class `MODULE.CLASS`. The module may lie in the working folder.

    Args:
        name: `MODULE.CLASS`.
        what: Names the setting in error messages.
        base: Class that the user's class must be derived from.

    Raises:
        UserError: `name` has no module part, the import fails, or the attribute is not a class derived from `base`.
    """
    imported = _imported(name, what, "CLASS")
    if not (isinstance(imported, type) and issubclass(imported, base)):
        raise UserError(f"{what} is not a class derived from {base.__module__}.{base.__name__}; derive it from that")
    return imported


def _imported(name: str, what: str, kind: str) -> Any:
    """Imports an attribute of a module. The working folder is added to `sys.path`."""
    module, _, attribute = name.rpartition(".")
    if not module:
        raise UserError(f"{what} must be MODULE.{kind} of your own")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{what} cannot be imported from {os.getcwd()}: {error}") from error


def override(path: str, value: Any) -> str:
    """Formats `path=value` as a command-line override, in Hydra's grammar."""
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
