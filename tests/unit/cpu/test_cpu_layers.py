"""Fused layers of the cpu backend equal the torch layers: attention after shared prompts, and a training step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.actor.batch.context_parallel import Cut
from megarl.actor.batch.shared_prefix import share
from megarl.actor.config import EngineConfig
from megarl.actor.model.attention.packed import PackedAttention, pack_in_blocks
from megarl.actor.supervised import MegatronLMEngine
from megarl.cpu import layers
from megarl.parallel import groups
from megarl.types import PackedBatch, cu_seqlens_of

CPU = torch.device("cpu")


class HeadsOfEight:
    kv_channels = 8
    context_parallel_size = 1


def group_of_sequences(prompt: int, completions: list[int]) -> PackedBatch:
    ids = [torch.cat([torch.arange(prompt), 1000 + 100 * i + torch.arange(n)]) for i, n in enumerate(completions)]
    lengths = torch.tensor([len(row) for row in ids])
    return PackedBatch(
        cu_seqlens_of(lengths), {"input_ids": torch.cat(ids)}, {"group_ids": torch.zeros(len(ids), dtype=torch.long)}
    )


@pytest.mark.parametrize("shared_prompt", [False, True])
@pytest.mark.parametrize(("prompt", "completions"), [(40, [60, 3, 9, 3]), (3, [8, 200, 8]), (2100, [5, 9])])
def test_fused_attention_and_its_gradients_are_those_of_the_blocks(
    prompt: int, completions: list[int], shared_prompt: bool
) -> None:
    batch = group_of_sequences(prompt, completions)
    shared = share(batch) if shared_prompt else None
    tokens = batch.total_tokens if shared is None else shared.source.numel()
    torch.manual_seed(0)
    inputs = tuple(torch.randn(tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    plain = PackedAttention(HeadsOfEight())
    expected = plain(*inputs, None, packed_seq_params=pack_in_blocks(batch.cu_seqlens, CPU, shared=shared))
    packed = layers.packing(pack_in_blocks, torch.zeros(4))(batch.cu_seqlens, CPU, Cut(), shared)  # angles of 0
    fused = layers.fused_attention(PackedAttention)(HeadsOfEight())
    out = fused(*inputs, None, packed_seq_params=packed)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    upstream = torch.randn_like(out)
    gradients, expected_gradients = (torch.autograd.grad(x, inputs, upstream) for x in (out, expected))
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-4)


def run_step(backend: str, checkpoint: Path) -> tuple[Tensor, dict[str, float]]:
    engine = MegatronLMEngine(EngineConfig(path=str(checkpoint), backend=backend))
    engine.initialize()
    lengths = torch.tensor([7, 30, 1, 12])
    ids = torch.arange(int(lengths.sum())) * 7 % 343
    batch = PackedBatch(cu_seqlens_of(lengths), {"input_ids": ids, "loss_mask": ids >= 0})
    logprobs, step = engine.logprobs(batch), engine.train_lm(batch)
    assert engine.backend.name == backend
    groups.destroy()
    return logprobs, step


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", True), ("mixtral", False)])
def test_a_step_on_the_fused_layers_is_one_on_the_plain_layers(
    family: str, tied: bool, checkpoints: Callable[..., Path]
) -> None:
    checkpoint = checkpoints(family, tied=tied)
    (fused, fused_step), (plain, plain_step) = (run_step(name, checkpoint) for name in ("cpu", "torch"))
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-5)
    assert fused_step == pytest.approx(plain_step, rel=1e-4)
    assert not torch.equal(fused, plain)  # the backends are different implementations
