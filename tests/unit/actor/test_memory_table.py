"""An estimate of memory changes on purpose alone: `memory_table.json` has it byte for byte."""

from __future__ import annotations

import json

import pytest

from tests.unit.actor import memory_table

RECORDED: dict[str, dict[str, float]] = json.loads(memory_table.FILE.read_text())


@pytest.fixture(scope="module")
def estimated() -> dict[str, dict[str, float]]:
    return dict(memory_table.rows())


def test_the_table_has_every_case(estimated: dict[str, dict[str, float]]) -> None:
    assert estimated.keys() == RECORDED.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_an_estimate_is_the_one_recorded(name: str, estimated: dict[str, dict[str, float]]) -> None:
    """Where a change is meant, `python -m tests.unit.actor.memory_table` writes the table anew."""
    assert estimated[name] == pytest.approx(RECORDED[name], rel=1e-12)
