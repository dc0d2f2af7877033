"""Ends a test that hangs outside Python, a minute after its limit: the process prints where each thread is.

The limit itself (pytest-timeout) is a signal's handler, which runs only in Python. pytest's `faulthandler_timeout` is
one number for all tests, and some have a limit of their own.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

GRACE_S = 60.0


class Hangs:
    """A plugin of each process that runs tests."""

    def __init__(self) -> None:
        assert sys.__stderr__ is not None
        self.stderr = os.dup(sys.__stderr__.fileno())  # tests' own output is captured

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._arm(item)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        """Counts anew for what follows a failure: pytest's own plugin has just cancelled it."""
        if isinstance(node, pytest.Item):
            self._arm(node)

    def _arm(self, item: pytest.Item) -> None:
        faulthandler.dump_traceback_later(limit_s(item) + GRACE_S, exit=True, file=self.stderr)


def limit_s(item: pytest.Item) -> float:
    """The limit of a test, its fixtures included: of its mark, of --timeout, or of pyproject.toml."""
    marker, config = item.get_closest_marker("timeout"), item.config
    return float(marker.args[0] if marker else config.getoption("timeout") or config.getini("timeout"))
