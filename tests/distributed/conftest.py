"""Starts the ranks of this folder's tests quickly, from a warm process, under the real launcher."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from megarl.launcher import watch
from tests import warm


@pytest.fixture(scope="module", autouse=True)
def warm_ranks() -> Iterator[None]:
    with warm.used(), mock.patch.object(watch, "STOP_DEADLINE_S", 600.0):  # a busy disk takes results late
        yield
