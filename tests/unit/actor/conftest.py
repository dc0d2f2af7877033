"""Fixtures for tests of the actor's engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.parallel import groups


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """Destroys the one-rank process group that the engines of a module share, after the module."""
    yield
    groups.destroy()
