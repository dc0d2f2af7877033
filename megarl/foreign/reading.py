"""Progress through the keys of another trainer's configuration: each sets knobs, needs no change, or is refused."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.foreign.yaml_file import Lines
from megarl.knobs import UserError, override

MOST = 10**12  # upper limit of counts


@dataclass(frozen=True)
class Tables:
    """Outcomes of plain keys."""

    knobs: Mapping[str, str]  # keys whose value a knob takes unchanged
    choices: Mapping[str, Mapping[Any, tuple[str, Any] | None]]  # by value: a knob with its value, or no change
    needless: Mapping[str, str]  # keys without effect, with the reason
    why_not: Mapping[str, str]  # reasons of refusals
    others: Sequence[str] = ()  # keys that the reader itself converts
    off: Collection[str] = ()  # keys without a counterpart, which ask for nothing where they are false
    defaults: Collection[str] = ()  # keys of `choices` without a counterpart, which ask for nothing at their default


@dataclass(frozen=True)
class Origin:
    """The key that set a knob."""

    key: str
    same: bool = True  # True: the knob takes the key's value unchanged


@dataclass(frozen=True)
class Converted:
    """A configuration as megarl takes it."""

    overrides: list[str]  # for `cli.load`
    table: str  # every key's outcome, to be printed
    source: str  # the file or command
    origins: dict[str, Origin]  # by knob
    lines: Lines = Lines("")

    def in_its_words(self, message: str) -> str:
        """Rewords an error about a knob as one about the source's key that set it, with the line.

        Where a knob's value was computed, the knob stays and the key is added. A message that names the file's line
        already is returned as it is.
        """
        if self.lines.path and f"{self.lines.path}:" in message:
            return message
        named: dict[str, Origin] = {}
        told = _KNOB.sub(lambda found: self._word(found, named), message)
        places = {origin.key: where for origin in named.values() if (where := self.lines.at(origin.key))}
        first = next(iter(places.values()), "")
        notes = [f"{knob} is {origin.key}" for knob, origin in named.items() if not origin.same]
        notes += [f"{key} is at {where}" for key, where in places.items() if where != first]
        notes += [f"in {self.source}"] if named and not first else []
        return (f"{first}: " if first else "") + told + (f" ({', '.join(notes)})" if notes else "")

    def _word(self, found: re.Match[str], named: dict[str, Origin]) -> str:
        """The key for a knob in a message. A name without a dot is a knob only before `=`, or as a whole key."""
        knob = found["knob"]
        origin = self.origins.get(knob)
        if origin is None or ("." not in knob and not found["set"] and not found["before"]):
            return found[0]
        named[knob] = origin
        return found["before"] + (origin.key if origin.same else knob) + found["set"]


_KNOB = re.compile(r"(?P<before>config key |full_key: |)(?<![\w./])(?P<knob>[A-Za-z_]\w*(?:\.\w+)*)(?P<set>=|)")


@dataclass
class Reading:
    """Progress through one file: unread keys, overrides so far, table rows (key, value, text) and refusals."""

    unread: dict[str, Any]
    lines: Lines = Lines("")
    unset: Sequence[str] = ()  # keys that are null
    taken: dict[str, Any] = field(default_factory=dict)  # values by key, of those that are read
    overrides: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)  # by knob

    def take(self, key: str, default: Any = None) -> Any:
        """Removes a key from the unread ones and returns its value."""
        if key in self.unread:
            self.taken[key] = self.unread[key]
        return self.unread.pop(key, default)

    def set(self, key: str, value: Any, knob: str, becomes: Any, note: str = "") -> None:
        """Sets a knob from a key and adds the table row for it. A knob takes a scalar or a list of them."""
        for item in becomes if isinstance(becomes, list) else [becomes]:
            if not isinstance(item, str | int | float):
                return self.refuse(key, value, "must be text, a number, true or false, or a list of these")
        self.overrides[knob] = becomes
        self.origins[knob] = Origin(key, same=plain(becomes) == plain(value))
        self.note(key, value, f"{knob}={plain(becomes)}" + (f"  ({note})" if note else ""))

    def note(self, key: str, value: Any, text: str) -> None:
        """Adds a row to the table."""
        self.rows.append((plain(key), plain(value) if value is not None else "(not set)", text))

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Records an error with its line, or that of a key in `why`. Reading goes on, to report all errors together."""
        where = next(filter(None, map(self.lines.at, [key, *re.findall(r"[\w.]+(?==)", why)])), "")
        self.refused.append((f"{where}: " if where else "") + f"{plain(key)}: {plain(value)}  {why}")

    def number(self, key: str, default: float, least: float = 0) -> float:
        """Takes a number. Any other value is refused, and the default takes its place."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST:
            self.refuse(key, value, f"must be a number from {least} to {MOST}")
            return default
        return value

    def whole(self, key: str, default: int, least: int = 0) -> int:
        """Takes a whole number, which YAML may write as `2.0`. Any other value is refused; see `number`."""
        value = self.number(key, default, least)
        if value != int(value):
            self.refuse(key, value, "must be a whole number")
        return int(value)

    def optional_number(self, key: str) -> float | None:
        """Takes a number, or None if the key is not set."""
        return self.number(key, 0) if key in self.unread else None

    def text(self, key: str, default: str = "") -> str:
        """Takes text. Any other value is refused, and the default takes its place."""
        value = self.take(key, default)
        if isinstance(value, str):
            return value
        self.refuse(key, value, "must be text")
        return default

    def flag(self, key: str, default: bool = False) -> bool:
        """Takes true or false. Any other value is refused, and the default takes its place."""
        value = self.take(key, default)
        if isinstance(value, bool):
            return value
        self.refuse(key, value, "must be true or false")
        return default

    def plain_key(self, key: str, tables: Tables) -> None:
        """Looks a key up in the tables, and refuses it if it is in none."""
        value = self.take(key)
        choices = tables.choices.get(key)
        if key in tables.knobs:
            self.set(key, value, tables.knobs[key], value)
        elif choices is not None and isinstance(value, str | int | float) and value in choices:
            choice = choices[value]
            if choice is None:
                same = "its default asks for nothing" if key in tables.defaults else "megarl does the same"
                self.note(key, value, f"no change: {same}")
            else:
                self.set(key, value, *choice)
        elif key in tables.needless:
            self.note(key, value, f"no change: {tables.needless[key]}")
        elif value is False and choices is None and (key in tables.off or key in tables.why_not):
            self.note(key, value, "no change: it is off")
        elif choices is not None:
            why = tables.why_not.get(key, "")
            allowed = ", ".join(plain(v) for v in choices)
            self.refuse(key, value, f"is not one of {allowed}" + (f"; {why}" if why else ""))
        elif key in tables.why_not:
            self.refuse(key, value, tables.why_not[key])
        else:
            known = [*tables.knobs, *tables.choices, *tables.needless, *tables.others, *tables.off]
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
            self.refuse(key, value, "is not a supported key" + (f"; did you mean {near[0]}?" if near else ""))

    def _note_the_rest(self) -> None:
        """Adds a row for every key that has none: it is null, or was read together with others."""
        told = {re.sub(r"\[.*", "", name) for key, _, _ in self.rows for name in re.split(r", | x ", key)}
        for key, value in self.taken.items():
            if plain(key) not in told:
                self.note(key, value, "read together with other keys")
        for key in self.unset:
            if plain(key) not in told:
                self.note(key, None, "no change: null")

    def finish(self, source: str, tables: Tables) -> Converted:
        """Reads the keys that are left as plain ones, and returns the whole.

        Args:
            source: the file or command line, for messages.
            tables: outcomes of plain keys.

        Raises:
            UserError: some keys are not supported (all of them, one line each).
        """
        for key in list(self.unread):
            self.plain_key(key, tables)
        self._note_the_rest()
        if self.refused:
            raise UserError(
                f"{source} has keys that megarl does not support:" + "".join(f"\n  {line}" for line in self.refused)
            )
        overrides = [_override(knob, value) for knob, value in self.overrides.items()]
        return Converted(overrides, _table(source, self.rows), source, self.origins, self.lines)


def number_of(value: Any) -> Any:
    """Converts text such as 1e-5 to a number, as YAML 1.1 reads it as a string."""
    try:
        return float(value) if isinstance(value, str) and value[:1] in "0123456789.-" else value
    except ValueError:
        return value


def reading_of(values: Mapping[str, Any], lines: Lines) -> Reading:
    """Starts with these keys: text that is a number becomes one, and keys that are null are set aside."""
    given = {key: number_of(value) for key, value in values.items() if value is not None}
    return Reading(given, lines, [key for key in values if key not in given])


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens mappings to dotted keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        result.update(flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return result


def plain(value: Any) -> str:
    """Formats a value in one line."""
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError):  # a date as a key, or a list inside itself
        return repr(value)


def _override(knob: str, value: Any) -> str:
    """Formats an override in Hydra's grammar. A key of `sglang` is new to the configuration, which takes a `+`."""
    plus = "+" if knob.startswith("sglang.") else ""
    return f"algorithm={value}" if knob == "algorithm" else plus + override(knob, value)


def _table(source: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """Lays the rows out in columns; long values are shortened."""
    cut = [(key, value if len(value) <= 40 else value[:37] + "...", text) for key, value, text in rows]
    widths = [max((len(row[i]) for row in cut), default=0) for i in (0, 1)]
    lines = [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {text}" for key, value, text in cut]
    return f"{source}, as megarl reads it:\n" + "\n".join(lines)
