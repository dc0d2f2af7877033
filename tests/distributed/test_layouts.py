"""The actor against transformers, in fp32, for every family and layout: log-probs, steps, weights in and out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.launcher.local import run_ranks
from megarl.types import cu_seqlens_of
from tests.distributed.layout_worker import ADAM, ENTROPY_BONUS, STEPS

LAYOUTS = {"tp1": (1, 1, 1), "tp2": (2, 1, 1), "pp2": (1, 2, 1), "dp2": (1, 1, 2), "tp2pp2": (2, 2, 1)}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_untied": {"family": "qwen2", "tied": False, "vocab_size": 343},
    "qwen2_tied": {"family": "qwen2", "tied": True, "vocab_size": 337},
    "qwen3_tied": {"family": "qwen3", "tied": True, "vocab_size": 341},
    "qwen3_untied": {"family": "qwen3", "tied": False, "vocab_size": 352},
    "llama_untied_llama3_rope": {
        "family": "llama", "tied": False, "vocab_size": 347, "rope_parameters": LLAMA3_ROPE
    },
    "llama_biased": {"family": "llama", "tied": False, "vocab_size": 339, "attention_bias": True},
    "mistral": {"family": "mistral", "tied": False, "vocab_size": 338, "sliding_window": None},
    "llama_tied_mha": {"family": "llama", "tied": True, "vocab_size": 345, "num_key_value_heads": 4},
}  # fmt: skip
LENGTHS = torch.tensor([5, 33, 2, 20, 17, 40, 12, 1])


def make_batch(vocab_size: int) -> dict[str, Tensor]:
    """Sequences of mixed lengths with random tokens, mask and advantages; no sequence's first token is trained on."""
    generator = torch.Generator().manual_seed(vocab_size)
    cu_seqlens = cu_seqlens_of(LENGTHS)
    total = int(LENGTHS.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    mask[cu_seqlens[:-1].long()] = False
    return {
        "cu_seqlens": cu_seqlens,
        "input_ids": torch.randint(0, vocab_size, (total,), generator=generator),
        "loss_mask": mask,
        "advantages": torch.randn(total, generator=generator),
    }


def reference_logprobs(model: Any, batch: dict[str, Tensor], lengths: Tensor = LENGTHS) -> tuple[Tensor, Tensor]:
    """Token-aligned log-probs and entropies by transformers, one sequence at a time."""
    logprobs, entropies = [], []
    for ids in batch["input_ids"].split(lengths.tolist()):
        table = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        first = torch.zeros(1)
        logprobs += [first, table.gather(1, ids[1:, None]).squeeze(1)]
        entropies += [first, -(table.exp() * table).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def reference_steps(model: Any, batch: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Trains the model in place; returns each step's loss and gradient norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
    steps = []
    for _ in range(STEPS):
        logprobs, entropy = reference_logprobs(model, batch)
        mask = batch["loss_mask"]
        loss = -((logprobs * batch["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """By model: its folder, batch, and what transformers makes of them."""
    result = {}
    for name, fields in MODELS.items():
        folder = checkpoints(**fields)
        batch = make_batch(fields["vocab_size"])
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, batch)
        steps = reference_steps(model, batch)
        result[name] = {
            "folder": folder, "batch": batch, "weights": weights, "logprobs": logprobs, "steps": steps,
            "trained": dict(model.state_dict()),
        }  # fmt: skip
    return result


@pytest.fixture(scope="module", params=LAYOUTS)
def results(
    request: pytest.FixtureRequest, cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder in which one run of the layout's ranks left its results for all models."""
    work = tmp_path_factory.mktemp(request.param)
    for name, case in cases.items():
        (work / name).mkdir()
        (work / name / "model").symlink_to(case["folder"])
        save_file(case["batch"], work / name / "batch.safetensors")
    layout = LAYOUTS[request.param]
    arguments = [str(work), *map(str, layout)]
    logs = tmp_path_factory.mktemp("logs")
    code = run_ranks("tests.distributed.layout_worker", arguments, math.prod(layout), logs)
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
    return work


@pytest.mark.parametrize("name", MODELS)
def test_the_actor_agrees_with_transformers(name: str, results: Path, cases: dict[str, dict[str, Any]]) -> None:
    case, out = cases[name], load_file(results / name / "out.safetensors")
    torch.testing.assert_close(out["logprobs"], case["logprobs"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out["one_by_one"], out["logprobs"], atol=1e-5, rtol=0)
    stats = json.loads((results / name / "stats.json").read_text())
    for step, (loss, norm) in zip(stats, case["steps"], strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=2e-5)

    names = {n for n in case["weights"] if not (MODELS[name]["tied"] and n == "lm_head.weight")}
    assert {n.removeprefix("before.") for n in out if n.startswith("before.")} == names
    for tensor in names:
        assert torch.equal(out[f"before.{tensor}"], case["weights"][tensor]), tensor
        torch.testing.assert_close(out[f"after.{tensor}"], case["trained"][tensor], atol=1e-5, rtol=0, msg=tensor)

    exported = AutoModelForCausalLM.from_pretrained(results / name / "exported").state_dict()
    for tensor in names:
        assert torch.equal(exported[tensor], out[f"after.{tensor}"]), tensor
