"""The structure of a copied value. Copies to a GPU run in `tests/fake_cuda`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.device_copies import OnHost, to_device
from megarl.types import PackedBatch


@dataclass(frozen=True)
class Held:
    """A value with tensors in it, as a microbatch is."""

    ids: Tensor
    parts: tuple[Tensor, ...]
    named: dict[str, Tensor]
    bounds: OnHost
    batch: PackedBatch
    name: str = "held"


def test_tensors_are_found_wherever_a_value_holds_them() -> None:
    ids = torch.arange(3)
    batch = PackedBatch(torch.tensor([0, 3]), {"input_ids": ids}, {"rewards": torch.ones(1)})
    batch.shared = True
    value = Held(ids, (ids, torch.ones(2)), {"mask": ids > 1}, OnHost(ids), batch)
    value.__dict__["plan"] = [ids]  # an attribute that its class does not know
    moved: Any = to_device(value, "meta")
    in_batch = [moved.batch["input_ids"], moved.batch["rewards"], moved.batch.cu_seqlens]
    found = [moved.ids, *moved.parts, moved.named["mask"], moved.plan[0], *in_batch]
    assert {x.device.type for x in found} == {"meta"}
    assert moved.bounds is value.bounds
    assert (moved.name, moved.batch.shared, moved.batch.bounds) == ("held", True, [0, 3])
    assert isinstance(moved.parts, tuple)
    assert value.ids.device.type == "cpu"
