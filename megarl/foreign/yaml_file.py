"""YAML files that users write: their text, the line of every key, and mistakes told with file and line."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.knobs import UserError

# PyYAML lets errors of Python pass, such as ValueError for a month 99 and KeyError for `!!bool x`.
NO_YAML = (ValueError, LookupError, AttributeError, TypeError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True)
class Lines:
    """Lines of a file's keys. A key is a dotted path such as `a.b`, and `a[0].b` inside a list."""

    path: str
    by_key: Mapping[str, int] = field(default_factory=dict)

    def at(self, key: str) -> str:
        """Returns `FILE:LINE` of a key, or of the nearest key around it; "" if the file has neither.

        Of keys joined by `, ` or ` x `, the first that the file has counts.
        """
        for name in re.split(r", | x ", key):
            while name:
                if name in self.by_key:
                    return f"{self.path}:{self.by_key[name]}"
                name = name[: max(name.rfind("."), name.rfind("["), 0)]
        return ""


def read_text(path: str, option: str) -> str:
    """Reads the file that `option` of the command line names.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        content = Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a null byte; RuntimeError: no home folder
        raise UserError(f"{option} {path} cannot be read: {' '.join(str(error).split())}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8; save the file as that"
        ) from error


def not_yaml(path: str, text: str, error: Exception) -> UserError:
    """Tells a mistake of syntax with its line."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        what = error.problem or error.context or "no YAML"
        return UserError(f"{path}:{mark.line + 1}:{mark.column + 1}: this is no YAML: {' '.join(what.split())}")
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return UserError(f"{path}:{line}: this is no YAML: character {error.character:#x} is not allowed")
    bad_value = _line_of_bad_value(text)
    where = f"{path}:{bad_value}" if bad_value else path
    return UserError(f"{where}: this is no YAML: {' '.join(str(error).split()) or type(error).__name__}")


def _line_of_bad_value(text: str) -> int | None:
    """Line of the first value that cannot be made, such as a month 99; None if that is not what is wrong."""
    loader = yaml.SafeLoader(text)
    try:
        waiting = [loader.get_single_node()]
    except NO_YAML:
        return None
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)
        elif node is not None:
            try:
                loader.construct_object(node)
            except NO_YAML:
                return int(node.start_mark.line) + 1
    return None


def lines_of(path: str, text: str) -> Lines:
    """Finds the line of every key.

    Raises:
        UserError: the text is no YAML, or a mapping has a key twice.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return Lines(path, dict(_keys(path, root, "", set(), ())))
    except UserError:
        raise
    except NO_YAML as error:
        raise not_yaml(path, text, error) from error


def _keys(path: str, node: Any, prefix: str, seen: set[int], above: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yields keys and lines. A node that aliases repeat is walked once. `above` has the nodes around this one."""
    if id(node) in above:
        raise UserError(f"{path}:{node.start_mark.line + 1}: an alias refers to the value that it stands in")
    if id(node) in seen:
        return
    seen.add(id(node))
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield f"{prefix}[{i}]", item.start_mark.line + 1
            yield from _keys(path, item, f"{prefix}[{i}]", seen, above)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, f"{prefix}.{key.value}" if prefix else str(key.value)
            if name in lines:
                shown = name if name.isprintable() else repr(name)
                raise UserError(f"{path}:{line}: {shown} is given twice, first in line {lines[name]}; leave one out")
            lines[name] = line
            yield name, line
            yield from _keys(path, value, name, seen, above)


def load_yaml(path: str, option: str) -> tuple[dict[str, Any], Lines]:
    """Reads the mapping in a YAML file that `option` of the command line names, and the lines of its keys.

    Raises:
        UserError: the file cannot be read, with the line of the mistake, or holds no mapping.
    """
    text = read_text(path, option)
    lines = lines_of(path, text)
    try:
        values = yaml.safe_load(text)
    except NO_YAML as error:
        raise not_yaml(path, text, error) from error
    if not isinstance(values, dict):
        name = {"--from-axolotl": "an axolotl", "--from-areal": "an AReaL"}.get(option, "a TRL")
        raise UserError(f"{option} {path} holds no keys; {name} YAML is a mapping")
    return values, lines


def load_config(path: str) -> tuple[dict[Any, Any], Lines]:
    """Reads the mapping in a file of megarl's own knobs, as Hydra reads its files, and the lines of its keys.

    Raises:
        UserError: the file cannot be read, with the line of the mistake, or holds no mapping.
    """
    text = read_text(path, "--config")
    lines = lines_of(path, text)
    try:
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (*NO_YAML, OmegaConfBaseException) as error:
        raise not_yaml(path, text, error) from error
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds a list; it must map knobs to values (docs/configuration.md)")
    return values, lines
