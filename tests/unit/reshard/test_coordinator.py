"""Who is at fault where a transfer broke: links of rank 0 whose servers are said to have told this or that."""

from __future__ import annotations

import pytest

from megarl.reshard.config import ReshardConfig
from megarl.reshard.sync.coordinator import Coordinator, Retry, WeightSyncError
from megarl.reshard.sync.server_link import NoAnswer, RankFailure
from megarl.reshard.sync.sglang_hooks import ServerControlError
from megarl.reshard.transfer.store import Deadline

FIRST, SECOND = "127.0.0.1:1", "127.0.0.1:2"
GONE = ServerControlError("/update_weights_from_tensor was not answered: the server closed the connection")
SILENT = NoAnswer("it did not answer within 2 s")
LOST_ITS_PEER = RankFailure(0, {"error": "connection closed", "peer": "trainer rank 0"})
OUTCOMES = [{"error": "connection closed", "peer": "rank 0 of server 0"}]


def coordinator(told: dict[str, Exception], dead: set[str]) -> Coordinator:
    """Two servers in an attempt; `dead` are looked after by somebody."""
    chief = Coordinator(ReshardConfig(), [FIRST, SECOND], "key")
    chief.active = list(chief.links)
    chief.died = dead.__contains__

    def tell(error: Exception | None):  # type: ignore[no-untyped-def]
        return lambda deadline: error if isinstance(deadline, Deadline) else None

    for link in chief.active:
        link.verdict = tell(told.get(link.address))  # type: ignore[method-assign]
    return chief


@pytest.mark.parametrize("other", [None, LOST_ITS_PEER, SILENT])
@pytest.mark.parametrize("first", [GONE, SILENT])
def test_a_server_that_died_is_left_out_alone_whatever_the_other_tells(
    first: Exception, other: Exception | None
) -> None:
    chief = coordinator({FIRST: first} | ({SECOND: other} if other else {}), dead={FIRST})
    with pytest.raises(Retry):
        chief.blame(OUTCOMES)
    assert [link.address for link in chief.active] == [SECOND]
    assert [link.dirty for link in chief.links] == [True, True]  # the other one until a sync has brought it everything


def test_a_server_that_is_silent_and_lives_stops_the_sync() -> None:
    chief = coordinator({FIRST: LOST_ITS_PEER, SECOND: SILENT}, dead=set())
    with pytest.raises(WeightSyncError, match="did not answer within 2 s") as error:
        chief.blame(OUTCOMES)
    assert error.value.server == SECOND
