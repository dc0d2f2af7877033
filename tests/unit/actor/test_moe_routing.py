"""Mixtures of experts weigh their experts as transformers does, whether weights are normalised or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from transformers import AutoModelForCausalLM

from megarl.actor.config import EngineConfig
from megarl.actor.model.moe import overlaps_shared_experts
from megarl.actor.supervised import MegatronLMEngine
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of
from tests.conftest import random_model

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    ],
    ids=["mixtral", "normalised", "not normalised", "three experts"],
)
def test_logits_equal_transformers(checkpoints: Callable[..., Path], family: str, fields: dict[str, Any]) -> None:
    folder = checkpoints(family, tied=False, **fields)
    engine = MegatronLMEngine(EngineConfig(path=str(folder)))
    engine.initialize()
    ids = torch.randint(0, 343, (24,), generator=torch.Generator().manual_seed(0))
    logits = engine.eval().forward(PackedBatch(cu_seqlens_of(torch.tensor([24])), {"input_ids": ids}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids[None]).logits[0], rtol=1e-3, atol=2e-4)


def test_a_choice_across_a_tie_moves_its_token_and_later_ones_as_in_transformers(
    checkpoints: Callable[..., Path],
) -> None:
    """Where two scores tie, log-probs jump: a server that rounds otherwise is not wrong (`docs/families.md`)."""
    engine = MegatronLMEngine(EngineConfig(path=str(checkpoints("kimi_k2", tied=False, num_hidden_layers=3))))
    engine.initialize()
    router = next(m for module in engine.modules for m in module.modules() if isinstance(m, TopKRouter))
    model: Any = random_model("kimi_k2", tied=False, num_hidden_layers=3)  # experts in the last two
    gate = model.model.layers[1].mlp.gate
    inputs: list[torch.Tensor] = []
    gate.register_forward_pre_hook(lambda _, args: inputs.append(args[0].view(48, -1)))
    ids = torch.randint(0, 343, (48,), generator=torch.Generator().manual_seed(0))
    batch = PackedBatch(cu_seqlens_of(torch.tensor([48])), {"input_ids": ids})

    @torch.no_grad()
    def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return engine.eval().logprobs(batch)[1:], expected

    logprobs()
    scores = (inputs[0].double() @ gate.weight.detach().double().T).sigmoid() + gate.e_score_correction_bias
    best, experts = scores[8:40].topk(5)  # four are chosen
    gap, row = (best[:, 3] - best[:, 4]).min(0)
    expert, token = experts[row, 4], 8 + int(row)
    tie = gate.e_score_correction_bias[expert] + gap
    results = []
    for distance in (-3e-6, 3e-6):  # several times the rounding of a score
        for biases in (router.expert_bias, gate.e_score_correction_bias):
            biases[expert] = tie + distance
        computed, expected = logprobs()
        torch.testing.assert_close(computed, expected, atol=1e-5, rtol=0)
        results.append(computed)
    moved = (results[1] - results[0]).abs()  # entry i is of token i + 1, which reads tokens up to i
    assert moved[:token].max() < 1e-5
    assert moved[token] > 0.01
    assert moved[token + 1 :].max() > 1e-3


@pytest.mark.parametrize(
    ("sizes", "beside"),
    [
        ({"ep_size": 2, "dp_size": 2}, True),
        ({"tp_size": 4, "etp_size": 2, "sequence_parallel": True}, True),
        ({"tp_size": 2, "sequence_parallel": True}, False),  # experts cut as dense weights share their buffers
        ({"tp_size": 2, "etp_size": 1, "sequence_parallel": True}, False),  # nothing to run beside
        ({"ep_size": 2, "dp_size": 2, "overlap": False}, False),
    ],
)
def test_shared_experts_run_beside_exchanges_where_experts_have_buffers_of_their_own(
    sizes: dict[str, Any], beside: bool
) -> None:
    assert overlaps_shared_experts(ParallelConfig(**{"overlap": True, **sizes})) == beside
