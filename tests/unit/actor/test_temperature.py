"""Log-probs and gradients at a temperature equal transformers', by every way to compute the head."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import GRPO, GRPOConfig
from megarl.types import PackedBatch, cu_seqlens_of
from tests.unit.actor.test_engine import gradients

pytestmark = pytest.mark.usefixtures("world_of_one")

TEMPERATURE = 0.7
LENGTHS = torch.tensor([9, 14, 7, 21])


def batch_of() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    position = torch.cat([torch.arange(n) for n in LENGTHS.tolist()])
    ids = torch.randint(0, 343, (total,), generator=generator)
    return PackedBatch(cu_seqlens_of(LENGTHS), {"input_ids": ids, "loss_mask": position >= 3})


def reference(model: torch.nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Log-probs `[total_tokens]` of the trained tokens, and the sum of the entropies that they are drawn from."""
    logprobs, entropy = torch.zeros(batch.total_tokens), torch.zeros([])
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        ids, mask = batch["input_ids"][start:stop], batch["loss_mask"][start + 1 : stop]
        table = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        row = torch.cat([torch.zeros(1), table.gather(1, ids[1:, None]).squeeze(1) * mask])
        logprobs = logprobs.index_add(0, torch.arange(start, stop), row)
        entropy = entropy - ((table.exp() * table).sum(-1) * mask).sum()
    return logprobs, entropy


@pytest.mark.parametrize("kept_logits_mb", [0, 256], ids=["logits computed in chunks", "logits kept"])
def test_log_probs_entropy_and_gradients_equal_transformers(
    checkpoints: Callable[..., Path], kept_logits_mb: int
) -> None:
    folder, batch = checkpoints("qwen3", tied=True, vocab_size=343), batch_of()
    optimizer = OptimizerConfig(lr=1e-3, clip_grad=0.0)
    config = EngineConfig(path=str(folder), optimizer=optimizer, temperature=TEMPERATURE, kept_logits_mb=kept_logits_mb)
    actor = MegatronPPOActor(config, GRPO(GRPOConfig()))
    actor.initialize()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs, entropy = reference(model, batch)
    torch.testing.assert_close(actor.compute_logp(batch), logprobs.detach(), rtol=1e-4, atol=1e-5)

    def loss(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask = data["loss_mask"].float()
        return -(logprobs * mask).sum(), {"entropy": (entropy * mask).sum()}

    stats = actor.train_batch(batch, loss, lambda data: torch.ones([]), loss_input="logprobs")
    assert stats["loss"] == pytest.approx(-float(logprobs.sum()), rel=1e-5)
    assert stats["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    (-logprobs.sum()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in gradients(actor).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
