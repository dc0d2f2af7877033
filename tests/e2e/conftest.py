"""Commands that start in a moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import forked_servers, warm
from tests.e2e import test_main_job


@pytest.fixture(scope="module")
def warm_commands() -> Iterator[None]:
    """A module's `Command`s and their ranks are forked from a process that has imported everything. Not for tests that
    kill a command: its ranks are not its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_main_job, "subprocess", warm)
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_servers() -> Iterator[None]:
    """Servers that a test starts in its own process begin in a moment."""
    with forked_servers.used():
        yield
