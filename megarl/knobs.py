"""Configuration knobs: dataclass fields that carry one line of meaning and the values they take.

Every knob has one owner, a frozen dataclass next to the code that reads it. `docs/configuration.md` is generated from
the declarations, and `range_errors` checks any configuration against them.
"""

import difflib
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

# Upper ends of ranges that have no limit of their own.
MAX_COUNT = 10**9  # steps, rows, tokens
MAX_SECONDS = 10**6  # 12 days; poll() takes 2^31 ms
MAX_SEED = 2**32 - 1
MAX_WEIGHT = 1e6  # coefficients of a loss or a reward
MAX_NAME, MAX_PATH = 255, 4095  # bytes, Linux's limits
SHOWN_CHARS = 60  # of a value in an error message
# C0 and C1 controls but tab and line feed, and those that turn the direction of text.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


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


@dataclass(frozen=True)
class Range:
    """Values that a knob takes: a range of numbers, names to choose from, or paths. A list's entries all must be in it.

    Numbers are finite, and text is UTF-8 without NUL characters.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    path: bool = False

    def __str__(self) -> str:
        """The rule in words, such as "at least 0 and below 1"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(
            f"{words} {bound:{',' if bound % 1 == 0 else ''}}" for words, bound in bounds.items() if bound is not None
        )

    def holds(self, value: Any) -> bool:
        """True if the value, or each entry of a list or dict, is in the range."""
        if isinstance(value, dict):
            return all(self.holds(entry) for entry in value.values())
        if isinstance(value, list | tuple):
            return all(self.holds(entry) for entry in value)
        if isinstance(value, str):
            return _is_text(value) and self._holds_text(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def _holds_text(self, value: str) -> bool:
        if self.path:
            return len(os.fsencode(value)) <= MAX_PATH and all(
                len(os.fsencode(name)) <= MAX_NAME for name in value.split("/")
            )
        is_numeric = any(bound is not None for bound in (self.least, self.above, self.most, self.below))
        return not is_numeric and (not self.choices or value in self.choices)


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def knob(
    default: Any = MISSING,
    meaning: str = "",
    *,
    factory: Any = MISSING,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    path: bool = False,
) -> Any:
    """Declares a dataclass field with a default (or a default `factory`), one line of meaning, and its `Range`."""
    metadata = {"meaning": meaning, "range": Range(least, above, most, below, tuple(choices), path)}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def range_errors(config: Any, path: str = "") -> Iterator[str]:
    """Yields a message for each knob of a configuration, and of all inside it, whose value is outside its range.

    Args:
        config: Dataclass with knobs.
        path: Path of `config` in the run's configuration, such as `reshard`.
    """
    for item in fields(config):
        value, name = getattr(config, item.name), f"{path}.{item.name}" if path else item.name
        entries = value if isinstance(value, list) else [value]
        parts = [(f"{name}[{i}]" if entries is value else name, entry) for i, entry in enumerate(entries)]
        if any(is_dataclass(entry) for entry in entries):
            for part, entry in parts:
                yield from range_errors(entry, part)
            continue
        declared: Range = item.metadata.get("range", Range())
        for part, entry in parts:
            if not declared.holds(entry):
                yield f"{part}={shown(entry)} must be {_rule(declared, entry)} ({item.metadata.get('meaning', '')})"


def check_ranges(config: Any, path: str = "") -> None:
    """Refuses the first knob outside its range; see `range_errors`.

    Raises:
        UserError: with its path, its value, the range and its meaning.
    """
    for message in range_errors(config, path):
        raise UserError(message)


def _rule(declared: Range, value: Any) -> str:
    """The range in words, with the nearest choice to a misspelt one."""
    if isinstance(value, str) and not _is_text(value):
        return "UTF-8 without NUL characters"
    if isinstance(value, str) and declared.path:
        return f"a path of at most {MAX_PATH} bytes, and {MAX_NAME} in each name"
    if not str(declared):
        return "finite"
    near = difflib.get_close_matches(str(value), declared.choices, n=1)
    return f"{declared}; did you mean {near[0]}?" if near else str(declared)


def shown(value: Any) -> str:
    """A value as an error message shows it: on one line, and cut if it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN_CHARS:
        return f"{'-' * (value < 0)}(a number of {int(math.log10(abs(value))) + 1} digits)"
    text = (
        str(value) if isinstance(value, int | float) else repr(value)[1:-1] if isinstance(value, str) else repr(value)
    )
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def visible(text: str) -> str:
    """Text with its control characters written out, such as `\\x1b`: a completion must not steer the terminal."""
    return CONTROLS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


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
        escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), value)
        return f"'{escaped}'"  # backslashes count as such only before a quote
    return json.dumps(value)
