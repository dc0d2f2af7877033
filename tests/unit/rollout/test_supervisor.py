"""Changes of a server's status, with servers whose faults the test sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megarl.rollout.servers import supervisor as module
from megarl.rollout.servers.sglang_server import ServerError
from megarl.rollout.servers.supervisor import Supervisor


class Scripted:
    """A server that answers, is silent or is dead as the test says."""

    def __init__(self, address: str, owned: bool = True) -> None:
        self.address, self.owned, self.late = address, owned, True
        self.healthy, self.dead, self.starts = True, False, 0
        self.broken: Exception | None = None  # raised by a restart
        self.unknown: Exception | None = None  # raised by a look at it
        self.slow = False  # a restart takes long

    def answers(self, timeout_s: float) -> bool:
        return self.healthy

    def fault(self) -> ServerError | None:
        if self.unknown is not None:
            raise self.unknown
        return self.error("is dead") if self.dead else None

    def error(self, what: str) -> ServerError:
        return ServerError(f"{self.address} {what}")

    def restart(self) -> None:
        if self.broken is not None:
            raise self.broken
        self.starts += 1
        self.healthy, self.late, self.dead = not self.slow, not self.slow, False

    def stop(self) -> None:
        self.dead = True


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Supervisor]]:
    monkeypatch.setattr(module, "TICK_S", 0.01)
    supervisors: list[Supervisor] = []

    def start(*servers: Scripted, restarts: int = 2, heartbeat_s: float = 0.05) -> Supervisor:
        supervisors.append(Supervisor(servers, heartbeat_s, restarts))
        supervisors[-1].start()
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        supervisor.close()


def test_a_dead_server_is_started_again_and_serves_once_a_sync_has_brought_it_the_weights(watch) -> None:
    one, other = Scripted("one"), Scripted("other")
    supervisor = watch(one, other)
    changes: list[list[str]] = []
    supervisor.on_change = lambda: changes.append(supervisor.serving())
    one.dead = True
    until(lambda: one.starts == 1)
    assert supervisor.serving() == ["other"] == changes[0]
    until(lambda: supervisor.before_sync(1) == (["one"], []))
    supervisor.after_sync(["one", "other"])
    assert supervisor.serving() == ["one", "other"]
    assert ["one", "other"] in changes


def test_a_server_that_dies_during_a_sync_does_not_serve_after_it(watch) -> None:
    one, other = Scripted("one"), Scripted("other")
    supervisor = watch(one, other)
    supervisor.before_sync(1)
    one.dead = True
    until(lambda: one.starts == 1)
    supervisor.after_sync(["one", "other"])  # it was proven before it died
    assert supervisor.serving() == ["other"]


def test_a_server_that_fails_a_sync_is_started_again_though_it_answers(watch) -> None:
    one, other = Scripted("one"), Scripted("other")
    supervisor = watch(one, other)
    supervisor.after_sync(["other"])
    assert supervisor.serving() == ["other"]
    until(lambda: one.starts == 1)


def test_a_server_of_ours_that_died_is_told_from_one_that_lives_and_from_one_of_somebody_elses(
    watch, monkeypatch
) -> None:
    monkeypatch.setattr(module, "DEATH_GRACE_S", 0.0)  # it is looked at once all the same
    one, other, external = Scripted("one"), Scripted("other"), Scripted("external", owned=False)
    supervisor = watch(one, other, external, heartbeat_s=60)
    one.dead = external.dead = True
    assert supervisor.died("one")
    assert not supervisor.died("other")
    assert not supervisor.died("external")
    until(lambda: supervisor.outlook() == "ready")
    supervisor.before_sync(1)
    supervisor.after_sync(["one", "other"])
    assert not supervisor.died("one")


def test_a_server_that_is_started_again_during_the_look_at_it_has_died(watch, monkeypatch) -> None:
    class Restarted(Scripted):
        def fault(self) -> ServerError | None:
            if threading.current_thread() is threading.main_thread():
                until(lambda: self.starts == 1)
            return super().fault()

    monkeypatch.setattr(module, "DEATH_GRACE_S", 0.0)
    one = Restarted("one")
    supervisor = watch(one)
    one.dead = True
    assert supervisor.died("one")


def test_a_server_that_misses_one_look_waits_for_weights_and_one_that_misses_two_is_started_again(watch) -> None:
    one = Scripted("one")
    supervisor = watch(one, heartbeat_s=0.3)
    one.healthy = False
    until(lambda: supervisor.serving() == [])
    until(lambda: one.starts == 1)
    until(lambda: supervisor.outlook() == "ready")
    assert one.starts == 1


def test_after_the_last_restart_there_is_no_hope_and_the_cause_is_raised(watch) -> None:
    one = Scripted("one")
    supervisor = watch(one, restarts=1)
    for _ in range(2):
        one.dead = True
        until(lambda: not one.dead or supervisor.outlook() == "none")
    until(lambda: supervisor.outlook() == "none")
    assert one.starts == 1
    with pytest.raises(ServerError, match="one is dead"):
        supervisor.before_sync(1)


@pytest.mark.parametrize("failure", [OSError("no memory for a process"), ServerError("it left processes")])
def test_a_server_that_cannot_be_started_again_is_given_up_with_the_cause(watch, failure: Exception) -> None:
    one = Scripted("one")
    supervisor = watch(one)
    one.broken, one.dead = failure, True
    until(lambda: supervisor.outlook() == "none")
    one.dead = False
    with pytest.raises(ServerError, match=f"one cannot be started again: {failure}"):
        supervisor.before_sync(1)


def test_a_server_of_somebody_elses_is_not_waited_for_and_not_started_but_may_come_back(watch) -> None:
    one = Scripted("one", owned=False)
    supervisor = watch(one)
    one.healthy = False
    until(lambda: supervisor.outlook() == "none")
    with pytest.raises(ServerError, match="one does not answer"):
        supervisor.before_sync(1)
    one.healthy = True
    until(lambda: supervisor.outlook() == "ready")
    assert supervisor.before_sync(1) == (["one"], [])
    supervisor.after_sync(["one"])
    assert supervisor.serving() == ["one"]
    assert one.starts == 0


def test_a_server_that_went_long_ago_causes_no_error_while_another_serves(watch) -> None:
    one, other = Scripted("one"), Scripted("other")
    supervisor = watch(one, other, restarts=0)
    one.dead = True
    until(lambda: supervisor.serving() == ["other"])
    one.dead = False
    supervisor.raise_cause()
    supervisor.raise_cause("other")
    with pytest.raises(ServerError, match="one is dead"):
        supervisor.raise_cause("one")
    other.dead = True
    with pytest.raises(ServerError, match="other is dead"):  # also before its thread has looked
        supervisor.raise_cause()
    until(lambda: supervisor.outlook() == "none")
    with pytest.raises(ServerError, match="other is dead"):
        supervisor.raise_cause()


def test_a_server_whose_start_is_put_off_keeps_its_cause_and_its_restarts(watch) -> None:
    """As in each training phase of `colocate=true`, whose memory a starting server would take."""
    one, other = Scripted("one"), Scripted("other")
    supervisor = watch(one, other, restarts=1)
    one.slow = one.dead = True
    until(lambda: one.starts == 1 and not one.dead)
    for phase in range(3):
        supervisor.hold_restarts()
        assert one.dead
        with pytest.raises(ServerError, match="one is dead"):
            supervisor.raise_cause("one")
        time.sleep(0.1)
        assert one.starts == phase + 1
        supervisor.allow_restarts()
        until(lambda phase=phase: one.starts == phase + 2)
    assert supervisor.starts("one") == 4
    assert supervisor._statuses["one"].restarts == 1
    one.healthy = True
    until(lambda: supervisor.before_sync(1) == (["one"], []))
    supervisor.after_sync(["one", "other"])
    assert supervisor.serving() == ["one", "other"]


def test_a_silent_server_that_is_stopped_for_the_trainer_is_started_again_once_and_told_as_silent(watch) -> None:
    one = Scripted("one")
    supervisor = watch(one, Scripted("other"), restarts=1)
    one.healthy = one.late = False
    until(lambda: supervisor.serving() == ["other"])
    supervisor.hold_restarts()
    assert one.dead
    until(lambda: supervisor._statuses["one"].error is not None)
    with pytest.raises(ServerError, match="one did not answer, and was stopped for the trainer"):
        supervisor.raise_cause("one")
    supervisor.allow_restarts()
    until(lambda: supervisor.outlook() == "ready")
    assert one.starts == supervisor._statuses["one"].restarts == 1
    until(lambda: supervisor.before_sync(1) == (["one"], []))
    supervisor.after_sync(["one", "other"])
    one.healthy = one.late = False
    until(lambda: supervisor.serving() == ["other"])
    supervisor.raise_cause("one")  # its fault of long ago is none of now


def test_a_server_that_is_stopped_while_it_answers_does_not_wait_for_weights(watch) -> None:
    """SGLang's processes are looked for after the answer, which takes a moment."""
    one = Scripted("one")
    supervisor = watch(one, Scripted("other"), restarts=1)
    answers = one.answers

    def stopped_meanwhile(timeout_s: float) -> bool:
        answered = answers(timeout_s)
        if answered and one.starts == 1:
            supervisor.hold_restarts()
            held.set()
        return answered

    held = threading.Event()
    one.answers = stopped_meanwhile  # type: ignore[method-assign]
    one.dead = True
    assert held.wait(300)
    time.sleep(0.1)
    assert supervisor.before_sync(1) == ([], ["one"])
    supervisor.allow_restarts()
    until(lambda: supervisor.before_sync(1) == (["one"], []))
    assert one.starts == 2


def test_a_server_that_answers_late_after_a_failed_sync_does_not_wait_for_weights(watch) -> None:
    """The retry of the sync would admit it, and its restart end that sync too."""
    one = Scripted("one")
    supervisor = watch(one, Scripted("other"))
    answers, outlooks = one.answers, []

    def left_out_meanwhile(timeout_s: float) -> bool:
        if one.starts == 0:
            supervisor.after_sync(["other"])
            supervisor.on_change = lambda: outlooks.append((one.starts, supervisor.alive()))
        return answers(timeout_s)

    one.answers = left_out_meanwhile  # type: ignore[method-assign]
    until(lambda: supervisor.alive() == ["one", "other"] and one.starts == 1)
    assert all(alive == ["other"] for starts, alive in outlooks if starts == 0)


def test_a_server_that_cannot_be_looked_at_is_given_up_with_the_cause(watch) -> None:
    one = Scripted("one")
    supervisor = watch(one)
    one.unknown = RuntimeError("no such process")
    until(lambda: supervisor.outlook() == "none")
    one.unknown = None
    with pytest.raises(ServerError, match="one can no longer be watched: RuntimeError: no such process"):
        supervisor.raise_cause()
