"""Starts the ranks of this folder's tests quickly, from a warm process, under the real launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import warm


@pytest.fixture(scope="module", autouse=True)
def warm_ranks() -> Iterator[None]:
    with warm.used():
        yield
