"""Stored log-probs of a reference: read again only for the model that gave them, written by one rank of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.actor.config import EngineConfig, LoraConfig
from megarl.trainer import reference_logprobs
from megarl.trainer.reference_logprobs import _identity, stored
from megarl.types import PackedBatch, cu_seqlens_of


@pytest.mark.parametrize(
    "knobs",
    [
        {"lora": LoraConfig(rank=4, quantization="nf4")},
        {"float32_head": True},
        {"temperature": 0.5},
        {"dtype": "bfloat16"},
    ],
    ids=lambda knobs: next(iter(knobs)),
)
def test_another_reference_has_another_identity(knobs: dict[str, Any], checkpoints: Callable[..., Path]) -> None:
    plain = EngineConfig(path=str(checkpoints("qwen3", tied=True)), lora=LoraConfig(rank=4))
    assert _identity(plain, []) == _identity(replace(plain, lora=LoraConfig(rank=8)), [])
    assert _identity(plain, []) != _identity(replace(plain, **knobs), [])


class Reference:
    """Gives 0.5 to every trained token."""

    def compute_logp(self, data: PackedBatch) -> torch.Tensor:
        return 0.5 * data["loss_mask"]

    def offload(self) -> None: ...


def pack(rows: Any) -> PackedBatch:
    batch = PackedBatch(cu_seqlens_of(torch.full((len(rows),), 3)), {"loss_mask": torch.ones(3 * len(rows)).bool()}, {})
    batch.set_sequences("row_ids", torch.tensor(rows))
    return batch


@pytest.mark.parametrize(
    ("rank", "shared", "writes"), [(0, True, 1), (1, True, 0), (1, False, 1)], ids=["rank 0", "its folder", "another"]
)
def test_one_rank_writes_a_folder_that_all_have(
    rank: int, shared: bool, writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written, collectives = tmp_path / "reference.reference.safetensors", [], 0

    def gather(value: Any) -> list[Any]:
        nonlocal collectives
        collectives += 1
        if collectives == 2 and rank == 0:
            assert path.is_file()
        elif collectives == 2 and shared:
            path.touch()  # rank 0 has written it
        return [False, value]

    monkeypatch.setattr(reference_logprobs, "gather_json", gather)
    monkeypatch.setattr(reference_logprobs, "is_rank0", lambda: rank == 0)
    monkeypatch.setattr(reference_logprobs, "cache_folder", lambda _: tmp_path)
    monkeypatch.setattr(reference_logprobs, "_identity", lambda *_: "reference")
    monkeypatch.setattr(reference_logprobs, "content_hash", lambda _: "")
    save = reference_logprobs.saved_file.save
    monkeypatch.setattr(
        reference_logprobs.saved_file, "save", lambda tensors, to: (written.append(to), save(tensors, to))
    )
    lookup = stored(EngineConfig(path="model"), [0, 1], pack, Reference)
    assert len(written) == writes
    assert lookup(pack([1, 0])).tolist() == [0.5] * 6
    if written:
        assert torch.equal(reference_logprobs.load_file(path)["logprobs"], torch.full((6,), 0.5))
