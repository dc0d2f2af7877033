"""The table of bytes that a step moves: docs/numbers.md has what the script prints."""

from __future__ import annotations

import pytest
from step_bytes import RECIPES, lines

from megarl import cli

PAGE = (cli.CONFIGS.parent / "docs" / "numbers.md").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_has_the_bytes_of_a_step_of_each_recipe(name: str) -> None:
    found = list(lines(name))
    assert all(ratio >= 1 - 1e-9 for _, ratio, _ in found)  # a lower bound
    assert ("sync" in [dimension for dimension, _, _ in found]) == name.startswith(("grpo", "dapo", "opd"))
    for _, _, line in found:
        assert line in PAGE
