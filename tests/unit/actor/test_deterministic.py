"""Engine of a deterministic run: its bits do not depend on packing, and inexact models and layouts are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.actor.checks import check_device
from megarl.actor.config import EngineConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import GRPO, GRPOConfig
from megarl.knobs import UserError
from megarl.ops.logprob import gather_logprobs
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF, same_bits
from megarl.types import PackedBatch, cu_seqlens_of

REFUSED = "actor.skipped_gradient=0.01 needs a head in chunks, and deterministic=true holds all logits; set it to 0"
LENGTHS = [9, 14, 7, 130, 11, 2, 70, 64]


pytestmark = pytest.mark.cpu_options("rollout and trainer compute the same bits on CPU only")


@pytest.fixture(autouse=True)
def own_world_and_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    groups.destroy()
    torch.set_num_threads(threads)


def actor_of(folder: Path, **knobs: object) -> MegatronPPOActor:
    algorithm = GRPO(GRPOConfig())
    actor = MegatronPPOActor(EngineConfig(path=str(folder), **knobs), algorithm, deterministic=same_bits(1))  # type: ignore[arg-type]
    actor.initialize()
    return actor


def batch_of(seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    cu_seqlens = cu_seqlens_of(torch.tensor(LENGTHS))
    total = int(cu_seqlens[-1])
    mask = torch.ones(total, dtype=torch.bool)
    mask[cu_seqlens[:-1].long()] = False
    ids = torch.randint(2, 340, (total,), generator=generator)
    return PackedBatch(cu_seqlens, {"input_ids": ids, "loss_mask": mask})


@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3", {"tied": True}), ("qwen2", {"tied": False}), ("llama", {"attention_bias": True, "tied": False})],
)
def test_log_probs_have_the_same_bits_however_sequences_are_packed(
    checkpoints: Callable[..., Path], family: str, fields: dict[str, bool]
) -> None:
    actor, batch = actor_of(checkpoints(family, **fields), temperature=0.7), batch_of()
    together = actor.compute_logp(batch).split(LENGTHS)
    for i, expected in enumerate(together):
        assert torch.equal(actor.compute_logp(batch.select([i])), expected)
    pair = actor.compute_logp(batch.select([6, 1]))
    assert torch.equal(pair, torch.cat([together[6], together[1]]))
    ids = batch["input_ids"][: LENGTHS[0]]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(actor.config.path, dtype=torch.float32)
        plain = gather_logprobs(model(ids[None]).logits[0, :-1], ids[1:], 0.7)
    torch.testing.assert_close(together[0][1:], plain, atol=2e-5, rtol=1e-5)


def test_prompts_that_a_group_shares_change_no_bit(checkpoints: Callable[..., Path]) -> None:
    prompt, completions = list(range(40, 75)), [[5, 6, 7], [8] * 20, [9, 10]]
    sequences = [prompt + completion for completion in completions]
    lengths = [len(sequence) for sequence in sequences]
    mask = torch.cat([torch.arange(length) >= len(prompt) for length in lengths])
    ids = torch.cat([torch.tensor(sequence) for sequence in sequences])
    batch = PackedBatch(
        cu_seqlens_of(torch.tensor(lengths)),
        {"input_ids": ids, "loss_mask": mask},
        {"group_ids": torch.zeros(3, dtype=torch.long)},
    )
    apart = actor_of(checkpoints("qwen3", tied=True)).compute_logp(batch)
    groups.destroy()
    shared = actor_of(checkpoints("qwen3", tied=True), shared_prefix=True).compute_logp(batch)
    assert torch.equal(shared, apart)
    assert bool((apart[mask] != 0).all())


@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3", {"tied": True}), *(("qwen3_moe", {"tied": False, "norm_topk_prob": sums}) for sums in (True, False))],
    ids=["dense", "weights of the chosen experts", "weights of all experts"],
)
def test_an_update_is_that_of_the_usual_layers(
    checkpoints: Callable[..., Path], family: str, fields: dict[str, Any]
) -> None:
    batch = batch_of()
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])
    batch.set_sequences("rewards", rewards)
    batch.set_sequences("group_ids", torch.arange(8) // 4)
    metrics, logprobs = [], []
    for deterministic in (same_bits(1), OFF):
        config = EngineConfig(path=str(checkpoints(family, **fields)))
        actor = MegatronPPOActor(config, GRPO(GRPOConfig()), deterministic=deterministic)
        actor.initialize()
        logprobs.append(actor.compute_logp(batch))
        batch.set_tokens("prox_logp", logprobs[-1])
        batch.set_tokens("rollout_logprobs", batch["prox_logp"].clone())
        actor.compute_advantages(batch)
        metrics.append(actor.ppo_update(batch))
        actor.destroy()
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=2e-5, rtol=0)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3, abs=1e-5)
    assert metrics[0]["grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("family", "knobs", "layout", "message"),
    [
        (
            "glm4_moe",
            {},
            {},
            "covers experts that a softmax chooses, without shared experts and biases, and a 'glm4_moe'",
        ),
        ("qwen3_moe", {"experts": "grouped"}, {}, "takes actor.experts=auto and parallel.etp_size of 1 or 2"),
        ("qwen3_moe", {}, {"dp_size": 4, "etp_size": 4}, "and they are auto and 4; change them"),
        ("qwen3", {"dtype": "bfloat16"}, {}, "actor.dtype=bfloat16 must be float32 with deterministic=true"),
    ],
)
def test_what_would_not_be_exact_is_refused(
    checkpoints: Callable[..., Path], family: str, knobs: dict[str, str], layout: dict[str, int], message: str
) -> None:
    config = EngineConfig(path=str(checkpoints(family, tied=False)), **knobs)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        MegatronPPOActor(config, GRPO(GRPOConfig()), ParallelConfig(**layout), deterministic=same_bits(1))  # type: ignore[arg-type]


def test_ranks_that_do_not_add_in_pairs_are_refused(checkpoints: Callable[..., Path]) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    config = EngineConfig(path=str(checkpoints("qwen3", tied=False, **sizes)))
    with pytest.raises(UserError, match=r"parallel\.tp_size=3 must be a power of two with"):
        MegatronPPOActor(config, GRPO(GRPOConfig()), ParallelConfig(tp_size=3), deterministic=same_bits(1))


def test_a_gpu_is_refused() -> None:
    with pytest.raises(
        UserError, match="deterministic=true gives rollout and trainer the same bits on CPU only; set it to false"
    ):
        check_device(EngineConfig(), has_gpu=True, same_bits=True)


def test_a_head_that_leaves_gradients_out_is_refused(checkpoints: Callable[..., Path]) -> None:
    with pytest.raises(UserError) as caught:
        actor_of(checkpoints("qwen3", tied=True), skipped_gradient=0.01)
    assert str(caught.value) == REFUSED
