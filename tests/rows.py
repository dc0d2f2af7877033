"""Rows of long tables of cases. `make test` runs some of them, and `make test-long` all.

A file with such a table has `pytestmark = rows.marks()`, so that `-m long` selects it with all rows.
"""

from __future__ import annotations

import os
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
