"""The order that a trainer sends: its pickle needs nothing that SGLang's allow-list refuses, also beside Megatron."""

from __future__ import annotations

import pickle
import pickletools
from base64 import b64decode

import megatron.core  # noqa: F401 - replaces the function of torch that pickles of storages name
import torch

from megarl.reshard.sync.server_order import ServerOrder
from megarl.reshard.sync.sglang_hooks import order_body


def test_an_order_is_pickled_without_megatrons_function() -> None:
    values = {"server": 3, "session": 2**61, "epoch": 1, "join": 1, "attempt_number": 7, "deadline_ms": 360_000}
    order = ServerOrder.of("127.0.0.1", port=29500, **values)
    (pickled,) = order_body(order, 1, True)["serialized_named_tensors"]
    assert ServerOrder.parse(pickle.loads(b64decode(pickled))) == order
    words = [argument for _, argument, _ in pickletools.genops(b64decode(pickled)) if isinstance(argument, str)]
    assert words == ["megarl.order", "torch", torch.LongTensor.__name__]
