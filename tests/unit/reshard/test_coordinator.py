"""Attribution of a broken transfer, with the servers' answers replaced by fixed errors."""

from __future__ import annotations

import pytest

from megarl.reshard.config import ReshardConfig
from megarl.reshard.sync.coordinator import Coordinator, Retry, WeightSyncError
from megarl.reshard.sync.server_control import ServerControlError
from megarl.reshard.sync.server_link import NoAnswer, RankFailure
from megarl.reshard.transfer.store import Deadline

FIRST, SECOND = "127.0.0.1:1", "127.0.0.1:2"
GONE = ServerControlError("/update_weights_from_tensor was not answered: the server closed the connection")
SILENT = NoAnswer("it did not answer within 2 s")
LOST_ITS_PEER = RankFailure(0, {"error": "connection closed", "peer": "trainer rank 0"})
OUTCOMES = [{"error": "connection closed", "peer": "rank 0 of server 0"}]


def coordinator_of(errors: dict[str, Exception], dead: set[str], on_failure: str = "stop") -> Coordinator:
    """Two servers in an attempt, with the error of each; `dead` have died and will be restarted."""
    coordinator = Coordinator(ReshardConfig(on_failure=on_failure), [FIRST, SECOND], "key")
    coordinator.active = list(coordinator.links)
    coordinator.death_probe = dead.__contains__

    def answer(error: Exception | None):  # type: ignore[no-untyped-def]
        return lambda deadline: error if isinstance(deadline, Deadline) else None

    for link in coordinator.active:
        link.order_error = answer(errors.get(link.address))  # type: ignore[method-assign]
    return coordinator


@pytest.mark.parametrize("other", [None, LOST_ITS_PEER, SILENT])
@pytest.mark.parametrize("first", [GONE, SILENT])
def test_a_server_that_died_is_left_out_alone_whatever_the_other_tells(
    first: Exception, other: Exception | None
) -> None:
    coordinator = coordinator_of({FIRST: first} | ({SECOND: other} if other else {}), dead={FIRST})
    with pytest.raises(Retry):
        coordinator.attribute_failure(OUTCOMES)
    assert [link.address for link in coordinator.active] == [SECOND]
    assert [link.dirty for link in coordinator.links] == [True, True]  # the second until a sync has succeeded


def test_a_server_that_is_silent_and_lives_stops_the_sync() -> None:
    coordinator = coordinator_of({FIRST: LOST_ITS_PEER, SECOND: SILENT}, dead=set())
    with pytest.raises(WeightSyncError, match="did not answer within 2 s") as error:
        coordinator.attribute_failure(OUTCOMES)
    assert error.value.server == SECOND


def waits_for(server: int) -> RankFailure:
    return RankFailure(0, {"error": f"rank 0 of server {server} left", "peer": f"rank 0 of server {server}"})


def test_a_server_that_another_waited_for_is_left_out_and_the_waiting_one_stays() -> None:
    """Nobody else tells anything: the trainer has sent its part, and the relay says that it is done."""
    coordinator = coordinator_of({SECOND: waits_for(0)}, dead=set(), on_failure="drop_server")
    with pytest.raises(Retry):
        coordinator.attribute_failure([{}])
    assert [link.address for link in coordinator.active] == [SECOND]


@pytest.mark.parametrize("other", [waits_for(0), SILENT])
def test_servers_that_do_not_reach_each_other_stay_for_an_attempt_without_relays(other: Exception) -> None:
    """A firewall between servers; the second may still wait when it is asked."""
    for on_failure in ("stop", "drop_server"):
        coordinator = coordinator_of({FIRST: waits_for(1), SECOND: other}, dead=set(), on_failure=on_failure)
        with pytest.raises(Retry):
            coordinator.attribute_failure([{}], relays_join=True)
        assert [link.address for link in coordinator.active] == [FIRST, SECOND]
    coordinator = coordinator_of({FIRST: waits_for(1), SECOND: GONE}, dead={SECOND}, on_failure="drop_server")
    with pytest.raises(Retry):
        coordinator.attribute_failure([{}], relays_join=True)
    assert [link.address for link in coordinator.active] == [FIRST], "one that died is left out at once"
    coordinator = coordinator_of({FIRST: SILENT}, dead=set(), on_failure="drop_server")
    with pytest.raises(Retry):
        coordinator.attribute_failure([{}], relays_join=True)
    assert [link.address for link in coordinator.active] == [SECOND], "silence alone is a server's own"


def test_of_servers_that_wait_for_each_other_in_a_row_the_last_is_left_out() -> None:
    """The trainer waits for the first, which waits for the second: it is the second that has told nothing."""
    coordinator = coordinator_of({FIRST: waits_for(1)}, dead=set(), on_failure="drop_server")
    with pytest.raises(Retry):
        coordinator.attribute_failure(OUTCOMES)
    assert [link.address for link in coordinator.active] == [FIRST]
