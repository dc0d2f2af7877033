"""Damaged answers of a server to the trainer's orders: a ServerControlError in one line, or what the server said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.reshard.sync.server_control import PendingCall, ServerControl, ServerControlError
from megarl.reshard.transfer.store import Deadline
from tests.damaged_json import damaged
from tests.fuzzing import fuzzed

INFO = {"pp_size": 1, "dp_size": 1, "tp_size": 4, "weight_version": "7", "success": True}


class Answers:
    """A connection that has one answer."""

    def __init__(self, status: int, body: bytes) -> None:
        self._status, self._body = status, body

    def answered(self, number: int, within_s: float) -> bool:
        return True

    def answer(self, number: int) -> tuple[int, bytes]:
        return self._status, self._body

    def close(self) -> None: ...


def control_of(status: int, body: bytes) -> ServerControl:
    """A server that answers everything so."""
    control = ServerControl("server:1", "key")
    control.send = lambda path, *_: PendingCall(Answers(status, body), 0, path)  # type: ignore[assignment,method-assign,arg-type]
    return control


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns, or the text of its ServerControlError."""
    try:
        return call()
    except ServerControlError as error:
        return str(error)


@fuzzed(bounded=300, long=50_000)
def test_a_damaged_answer_to_an_order_is_refused_or_read_as_it_is(effort: Any) -> None:
    @effort
    @given(st.sampled_from([200, 200, 200, 204, 404, 500]), damaged(INFO))
    def holds(status: int, body: bytes) -> None:
        control = control_of(status, body)
        said = outcome(lambda: control.model_info(Deadline(60)))
        if isinstance(said, dict):
            assert status == 200
            assert said.get("success") is not False
        ranks = outcome(lambda: control.tp_size(Deadline(60)))
        if isinstance(ranks, int):
            whole = json.loads(body)
            assert (whole["pp_size"], whole["dp_size"], whole["tp_size"]) == (1, 1, ranks)
            assert ranks >= 1
        lines = [text for text in (said, ranks) if isinstance(text, str)]
        assert not any("\n" in line for line in lines)

    holds()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, r"/server_info was answered without a whole number from 1 as pp_size: None"),
        ({**INFO, "tp_size": "4"}, "as tp_size: '4'"),
        ({**INFO, "tp_size": True}, "as tp_size: True"),
        ({**INFO, "tp_size": 0}, "as tp_size: 0"),
        ({**INFO, "dp_size": 2}, "its dp_size is 2: SGLang updates live weights only where it is 1"),
    ],
)
def test_a_server_without_a_layout_is_told(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(ServerControlError, match=message):
        control_of(200, json.dumps(answer).encode()).tp_size(Deadline(60))
