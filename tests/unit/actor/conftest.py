"""What tests of the actor's engines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.parallel import groups


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """Engines of a module share a world of one rank, which ends with it."""
    yield
    groups.destroy()
