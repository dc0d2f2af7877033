"""The order that a trainer sends: its pickle needs nothing that SGLang's allow-list refuses, also beside Megatron."""

from __future__ import annotations

import pickle
import pickletools
from base64 import b64decode
from dataclasses import astuple

import megatron.core  # noqa: F401 - replaces the function of torch that pickles of storages name
import pytest
import torch

from megarl.reshard.sync.server_order import ORDER, PROTOCOL, ServerOrder
from megarl.reshard.sync.sglang_hooks import order_body


def test_an_order_is_pickled_without_megatrons_function() -> None:
    values = {"server": 3, "session": 2**61, "epoch": 1, "join": 1, "attempt_number": 7, "deadline_ms": 360_000}
    order = ServerOrder.of("127.0.0.1", port=29500, **values)
    (pickled,) = order_body(order, 1, True)["serialized_named_tensors"]
    assert ServerOrder.parse(pickle.loads(b64decode(pickled))) == order
    words = [argument for _, argument, _ in pickletools.genops(b64decode(pickled)) if isinstance(argument, str)]
    assert words == ["megarl.order", "torch", torch.LongTensor.__name__]


VALID = (PROTOCOL, 0x7F000001, 29500, 3, 1, 0, 1, 7, 1000)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "the request holds nothing, expected 'megarl.order'"),
        ([("x", torch.zeros(9))], "the request holds 'x', expected"),
        ([(ORDER, torch.tensor([], dtype=torch.int64))], r"speaks weight protocol \[\], this server"),
        ([(ORDER, torch.tensor([PROTOCOL + 1, *VALID[1:]]))], "update one of them"),
        ([(ORDER, torch.tensor(VALID[:5]))], "must be 9 integers"),
        ([(ORDER, torch.tensor(VALID).double())], "must be 9 integers"),
        ([(ORDER, torch.tensor([PROTOCOL, 2**40, *VALID[2:]]))], "no valid address"),
        ([(ORDER, torch.tensor([*VALID[:2], 70000, *VALID[3:]]))], "no valid address"),
        ([(ORDER, torch.tensor([*VALID[:8], -1]))], "or a negative number"),
    ],
)
def test_an_order_that_no_trainer_sends_is_refused(named: list[tuple[str, torch.Tensor]], message: str) -> None:
    assert ServerOrder.parse([(ORDER, torch.tensor(VALID))]).port == 29500
    with pytest.raises(ValueError, match=message):
        ServerOrder.parse(named)


@pytest.mark.parametrize("values", [(PROTOCOL, 0, 1, 0, 0, 0, 0, 0, 0), (PROTOCOL, 2**32 - 1, 2**16 - 1, *VALID[3:])])
def test_the_ends_of_the_ranges_are_read(values: tuple[int, ...]) -> None:
    assert astuple(ServerOrder.parse([(ORDER, torch.tensor(values))])) == values


@pytest.mark.parametrize("port", [0, 2**16])
def test_a_port_outside_its_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="no valid address"):
        ServerOrder.parse([(ORDER, torch.tensor([*VALID[:2], port, *VALID[3:]]))])
