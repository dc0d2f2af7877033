"""Rows of long tables of cases. `make test` runs some of them, and `make test-long` all.

A file with such a table has `pytestmark = rows.marks()`, so that `-m long` selects it with all rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

VARIABLE = "MEGARL_TEST_ROWS"  # set by conftest.py, from pytest's -m

Row = TypeVar("Row")


def wants_all() -> bool:
    return os.environ.get(VARIABLE) == "all"


def marks() -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if wants_all() else []


def every(step: int, rows: list[Row]) -> list[Row]:
    """Each `step`-th row, from the first one."""
    return rows if wants_all() else rows[::step]


def only(names: str, rows: dict[str, Row]) -> dict[str, Row]:
    """The rows with these names, which commas separate."""
    return rows if wants_all() else {name: rows[name] for name in names.split(",") if name}


def diagonal(table: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Every third cell of a table, shifted by one from row to row."""
    return {
        name: [cell for column, cell in enumerate(cells) if wants_all() or (row + column) % 3 == 0]
        for row, (name, cells) in enumerate(table.items())
    }
