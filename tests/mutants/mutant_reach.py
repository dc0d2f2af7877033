"""A pytest plugin that records which functions of megarl each test calls, and how long the test takes.

    MEGARL_REACH=reach.json python -m pytest -p mutant_reach tests/unit

Calls during set-up belong to the whole file of the test, as other tests may use what a fixture made. Calls in other
processes are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path.cwd()
PACKAGE = str(ROOT / "megarl") + os.sep


class Reach:
    """Calls by owner: a test's id, or the file of tests whose set-up made them."""

    def __init__(self) -> None:
        self.calls: dict[str, set[tuple[str, int]]] = {}  # owner -> (file, first line of the function)
        self.seconds: dict[str, float] = {}
        self.passed: list[str] = []
        self._codes: set[Any] = set()

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        self._codes.add(frame.f_code)

    def _record(self, owner: str) -> Iterator[None]:
        self._codes = set()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            called = {(c.co_filename, c.co_firstlineno) for c in list(self._codes) if c.co_filename.startswith(PACKAGE)}
            files = {(str(Path(name).relative_to(ROOT)), line) for name, line in called}
            self.calls.setdefault(owner, set()).update(files)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._record(item.nodeid.split("::")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._record(item.nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        calls = {owner: sorted(called) for owner, called in self.calls.items()}
        reach = {"calls": calls, "seconds": self.seconds, "passed": self.passed}
        Path(os.environ["MEGARL_REACH"]).write_text(json.dumps(reach))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reach())
