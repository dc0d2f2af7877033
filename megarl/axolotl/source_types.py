"""Types of the values of an axolotl data set's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.axolotl.keys import DATASET_OPTIONS, MESSAGE_FIELDS


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(_is_text, value))


def _is_map_of_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, [*value, *value.values()]))


def _is_map_of_lists(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value)) and all(map(_is_list_of_text, value.values()))


def _is_type(value: Any) -> bool:
    set_fields = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
    return _is_text(value) or _is_map_of_text(set_fields)


# By key: True if a value fits, and the rule that it breaks otherwise.
SOURCE_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("path", "name", "split", *DATASET_OPTIONS, *MESSAGE_FIELDS), (_is_text, "must be text")),
    "type": (_is_type, "must be text, or names of fields and formats"),
    "data_files": (lambda value: _is_text(value) or _is_list_of_text(value), "must be a file or a list of files"),
    "message_property_mappings": (_is_map_of_text, "must map role and content to text"),
    "roles": (_is_map_of_lists, "must map each role to a list of text"),
}
