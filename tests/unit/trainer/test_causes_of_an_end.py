"""The error that ends a run is its cause: a dead server only where it is at fault, and no later error of closing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.reshard.session import WeightSyncError
from megarl.rollout.api import GenerationError
from megarl.rollout.closing import close_after
from megarl.rollout.executor import NoSamplesError, WorkflowError
from megarl.rollout.servers.sglang_server import ServerError
from megarl.rollout.servers.supervisor import GONE, Supervisor
from megarl.trainer.rollouts.weight_sync import WeightSync

LIVES, GONE_LONG_AGO = "127.0.0.1:1", "127.0.0.1:2"


def raised(error: Exception, *, serving: bool) -> Exception:
    servers: list[Any] = [SimpleNamespace(address=a, owned=True, fault=lambda: None) for a in (LIVES, GONE_LONG_AGO)]
    supervisor = Supervisor(servers, 60.0, 0)
    for address in (GONE_LONG_AGO,) if serving else (GONE_LONG_AGO, LIVES):
        status = supervisor._statuses[address]
        status.state, status.error = GONE, ServerError(f"{address} ended with exit code -9")
        status.lost_at = float(address[-1] == "1")
    sync: Any = SimpleNamespace(_rank0=SimpleNamespace(supervisor=supervisor))
    with pytest.raises((type(error), ServerError)) as caught, WeightSync.attributed_to_dead_servers(sync):
        raise error
    return caught.value


OTHERS = [
    WorkflowError("17 rewards failed"), GenerationError("no answer"), TimeoutError("a batch did not end"),
    WeightSyncError("wrong digests", server=LIVES), WeightSyncError("a trainer's rank failed"),
]  # fmt: skip


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_an_error_stays_while_the_server_at_fault_lives(error: Exception) -> None:
    assert raised(error, serving=True) is error


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_an_error_without_a_server_left_is_caused_by_the_last_that_went(error: Exception) -> None:
    cause = raised(error, serving=False)
    assert isinstance(cause, ServerError)
    assert str(cause) == f"{LIVES} ended with exit code -9"


@pytest.mark.parametrize("serving", [True, False])
def test_a_step_without_samples_stays_what_it_is(serving: bool) -> None:
    """It saves the last step on every rank."""
    error = NoSamplesError("all episodes were rejected")
    assert raised(error, serving=serving) is error


def test_a_failed_sync_is_caused_by_the_death_of_its_server() -> None:
    cause = raised(WeightSyncError("did not report", server=GONE_LONG_AGO), serving=False)
    assert str(cause) == f"{GONE_LONG_AGO} ended with exit code -9"


def test_an_error_while_closing_is_logged_after_another_and_raised_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise TimeoutError("cancelling the rollouts did not end")

    opened = contextlib.ExitStack()
    opened.callback(fail)
    close_after(NoSamplesError("no sample"), opened.close)
    assert caplog.messages == ["while the run ended: TimeoutError: cancelling the rollouts did not end"]
    opened.callback(fail)
    with pytest.raises(TimeoutError, match="cancelling the rollouts"):
        close_after(None, opened.close)
