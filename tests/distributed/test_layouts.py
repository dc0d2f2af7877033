"""The actor equals transformers in fp32, for every family and layout: log-probs, steps, loading and exporting."""

from __future__ import annotations

import functools
import json
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
from tests import rows
from tests.distributed.layout_worker import ADAM, ENTROPY_BONUS

SP = {"tp_size": 2, "sequence_parallel": True}
pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by world size; all layouts of a size run in the same processes
    1: {"tp1": {}},
    2: {
        "tp2": {"tp_size": 2},
        "tp2sp": SP,
        "pp2": {"pp_size": 2},
        "pp2_uneven": {"pp_size": 2, "first_stage_layers": 3, "last_stage_layers": 1},
        "pp2vpp2": {"pp_size": 2, "vpp_size": 2},
        "cp2": {"cp_size": 2},
        "dp2": {"dp_size": 2},
    },
    4: {
        "tp4": {"tp_size": 4},  # more ranks than KV heads
        "tp2pp2": {"tp_size": 2, "pp_size": 2},
        "tp2sp_pp2vpp2": {**SP, "pp_size": 2, "vpp_size": 2},
        "cp2_tp2sp": {**SP, "cp_size": 2},
        "cp2_pp2": {"cp_size": 2, "pp_size": 2},
        "cp2_dp2": {"cp_size": 2, "dp_size": 2},
        "pp2_dp2": {"pp_size": 2, "dp_size": 2},  # tied embeddings at both ends, sharded over replicas
        "cp4": {"cp_size": 4},
    },
}
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
MODELS_OF_ALL_LAYOUTS = ("qwen2_tied", "qwen3_untied", "mistral")
LAYOUTS_OF_ALL_MODELS = ("tp1", "tp2", "pp2") if rows.wants_all() else ("tp1",)
RUNS = {
    layout: list(MODELS if layout in LAYOUTS_OF_ALL_MODELS else MODELS_OF_ALL_LAYOUTS)
    for layouts in LAYOUTS.values()
    for layout in layouts
}
CASES = [
    pytest.param(size, layout, name, marks=[pytest.mark.long] if size == 4 else [], id=f"{size}-{layout}-{name}")
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for name in RUNS[layout]
]
LENGTHS = torch.tensor([5, 33, 2, 20, 17, 40, 12, 1])


def make_batch(vocab_size: int) -> dict[str, Tensor]:
    """Builds sequences of mixed lengths with random tokens, mask and advantages. First tokens are not trained."""
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
    """Computes token-aligned log-probs and entropies by transformers, one sequence at a time."""
    logprobs, entropies = [], []
    for ids in batch["input_ids"].split(lengths.tolist()):
        table = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        first = torch.zeros(1)
        logprobs += [first, table.gather(1, ids[1:, None]).squeeze(1)]
        entropies += [first, -(table.exp() * table).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def reference_steps(model: Any, batch: dict[str, Tensor]) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Trains the model in place. Returns each step's loss and gradient norm, and the first step's clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
    steps: list[tuple[float, float]] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(2):
        logprobs, entropy = reference_logprobs(model, batch)
        mask = batch["loss_mask"]
        loss = -((logprobs * batch["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps, gradients


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, and the results of transformers."""
    result = {}
    for name, fields in MODELS.items():
        folder = checkpoints(num_hidden_layers=4, **fields)
        batch = make_batch(fields["vocab_size"])
        model = AutoModelForCausalLM.from_pretrained(folder)
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, batch)
            best = torch.cat(
                [model(ids[None]).logits[0].argmax(-1) for ids in batch["input_ids"].split(LENGTHS.tolist())]
            )
        steps, gradients = reference_steps(model, batch)
        result[name] = {
            "folder": folder, "batch": batch, "weights": weights, "logprobs": logprobs, "best": best, "steps": steps,
            "gradients": gradients, "trained": dict(model.state_dict()),
        }  # fmt: skip
    return result


@pytest.fixture(scope="module")
def world(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`world(ranks)` runs all layouts of that many ranks, once, and returns the folder with their results."""
    return functools.cache(lambda ranks: run_world(ranks, cases, tmp_path_factory))


def run_world(
    ranks: int,
    cases: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    layouts: dict[str, dict[str, Any]] | None = None,
    runs: dict[str, list[str]] | None = None,
    worker: str = "layout_worker",
) -> Path:
    """Runs layouts, by default this file's, and the models of each. Returns the folder of results."""
    work = tmp_path_factory.mktemp(f"world{ranks}")
    layouts = LAYOUTS[ranks] if layouts is None else layouts
    models = {layout: (RUNS if runs is None else runs)[layout] for layout in layouts}
    for name in {name for layout in layouts for name in models[layout]}:
        (work / name).mkdir()
        (work / name / "model").symlink_to(cases[name]["folder"])
        save_file(cases[name]["batch"], work / name / "batch.safetensors")
    logs = tmp_path_factory.mktemp("logs")
    arguments = [str(work), json.dumps(layouts), json.dumps(models)]
    code = run_ranks(f"tests.distributed.{worker}", arguments, ranks, logs)
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
    return work


def check_against_files(
    case: dict[str, Any], folder: Path, *, norm: float, gradient: float, logprob: float = 1e-5
) -> None:
    """Compares a layout's results with those of transformers under their names on disk.

    `norm` and `gradient` are relative tolerances of the gradient norm and of each tensor's gradient; `logprob` is in
    nats.
    """
    out = load_file(folder / "out.safetensors")
    torch.testing.assert_close(out["logprobs"], case["logprobs"], atol=logprob, rtol=0)
    torch.testing.assert_close(out["one_by_one"], out["logprobs"], atol=logprob, rtol=0)
    for step, (loss, grad_norm) in zip(json.loads((folder / "stats.json").read_text()), case["steps"], strict=True):
        assert step["loss"] == pytest.approx(loss, rel=5e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(grad_norm, rel=norm)
    assert {n.removeprefix("before.") for n in out if n.startswith("before.")} == set(case["weights"])
    for tensor, weight in case["weights"].items():
        assert torch.equal(out[f"before.{tensor}"], weight), tensor
        expected = case["gradients"][tensor]
        difference = (out[f"gradient.{tensor}"] - expected).abs().max() / expected.abs().max()
        assert difference <= gradient, f"gradient of {tensor}: {difference}"
        torch.testing.assert_close(out[f"after.{tensor}"], case["trained"][tensor], atol=1e-5, rtol=0, msg=tensor)
    exported = load_file(folder / "exported" / "model.safetensors")
    assert exported.keys() == case["weights"].keys()
    assert all(torch.equal(exported[tensor], out[f"after.{tensor}"]) for tensor in exported)


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_the_actor_agrees_with_transformers(
    ranks: int, layout: str, name: str, cases: dict[str, dict[str, Any]], world: Callable[[int], Path]
) -> None:
    case, folder, tied = cases[name], world(ranks) / name / layout, MODELS[name]["tied"]
    out = load_file(folder / "out.safetensors")
    torch.testing.assert_close(out["logprobs"], case["logprobs"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out["one_by_one"], out["logprobs"], atol=1e-5, rtol=0)
    assert torch.equal(out["best"], case["best"])
    for step, (loss, norm) in zip(json.loads((folder / "stats.json").read_text()), case["steps"], strict=True):
        assert step["loss"] == pytest.approx(loss, rel=5e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=5e-5)

    names = {n for n in case["weights"] if not (tied and n == "lm_head.weight")}
    assert {n.removeprefix("before.") for n in out if n.startswith("before.")} == names
    for tensor in names:
        assert torch.equal(out[f"before.{tensor}"], case["weights"][tensor]), tensor
        gradient = case["gradients"][tensor]
        difference = (out[f"gradient.{tensor}"] - gradient).abs().max() / gradient.abs().max()
        assert difference <= 1e-4, f"gradient of {tensor}: {difference}"
        torch.testing.assert_close(out[f"after.{tensor}"], case["trained"][tensor], atol=1e-5, rtol=0, msg=tensor)

    exported = AutoModelForCausalLM.from_pretrained(folder / "exported").state_dict()
    for tensor in names:
        assert torch.equal(exported[tensor], out[f"after.{tensor}"]), tensor
