"""Fixtures of several folders of unit tests."""

from __future__ import annotations

import pytest

from megarl.sandbox import client


@pytest.fixture(autouse=True)
def late_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the limit of wall time to tests that set one: a busy machine gives a program its processor time late."""
    monkeypatch.setattr(client, "LEAST_WALL_S", 600.0)
