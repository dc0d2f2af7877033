"""Layers of a deterministic run: log-probs have the same bits in every layout, gradients are those of transformers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import rows
from tests.distributed.test_layouts import SP, make_batch, reference_logprobs, reference_steps, run_world

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one rank": {}},
    2: {
        "tp2": {"tp_size": 2},
        "tp2sp": SP,
        "cp2": {"cp_size": 2},
        "pp2": {"pp_size": 2},
        "dp2": {"dp_size": 2},
        "ep2": {"dp_size": 2, "ep_size": 2},
        "tp2sp_ep2": {**SP, "ep_size": 2, "etp_size": 1},
    },
    4: {"tp2sp_cp2": {**SP, "cp_size": 2}, "tp4": {"tp_size": 4}},
}
MODELS: dict[str, dict[str, Any]] = rows.only("qwen3,qwen3_moe", {
    "qwen3": {"family": "qwen3", "tied": True, "vocab_size": 341},
    "qwen3_moe": {  # a dense layer, weights that do not sum to 1
        "family": "qwen3_moe",
        "tied": True,
        "vocab_size": 341,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "num_experts_per_tok": 3,
    },
    "mixtral": {"family": "mixtral", "tied": False, "vocab_size": 343},
    "llama_biased": {"family": "llama", "tied": False, "vocab_size": 339, "attention_bias": True},
})  # fmt: skip
SPARSE = MODELS.keys() & {"qwen3_moe", "mixtral"}


def runs_of(ranks: int) -> dict[str, list[str]]:
    """The models of each layout: experts under tp need sequence parallelism, dense models have no ep."""
    dense = MODELS.keys() - SPARSE
    others = {"tp2": dense, "tp4": dense, "ep2": SPARSE, "tp2sp_ep2": SPARSE}
    return {layout: sorted(others.get(layout, MODELS)) for layout in LAYOUTS[ranks]}


CASES = [
    pytest.param(ranks, layout, name, marks=[pytest.mark.long] if ranks == 4 else rows.marks(), id=f"{layout}-{name}")
    for ranks in LAYOUTS
    for layout, names in runs_of(ranks).items()
    for name in names
]


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, and the results of transformers."""
    result = {}
    for name, fields in MODELS.items():
        folder = checkpoints(num_hidden_layers=2, **fields)
        batch = make_batch(fields["vocab_size"])
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, batch)
        steps, gradients = reference_steps(model, batch)
        result[name] = {"folder": folder, "batch": batch, "logprobs": logprobs, "steps": steps, "gradients": gradients}
    return result


@pytest.fixture(scope="module")
def world(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`world(ranks)` runs all layouts of that many ranks, once, and returns the folder with their results."""
    return functools.cache(
        lambda ranks: run_world(
            ranks, cases, tmp_path_factory, LAYOUTS[ranks], runs_of(ranks), worker="deterministic_worker"
        )
    )


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_a_layout_changes_no_bit_of_a_log_prob(
    ranks: int, layout: str, name: str, cases: dict[str, dict[str, Any]], world: Callable[[int], Path]
) -> None:
    case, folder = cases[name], world(ranks) / name / layout
    out = load_file(folder / "out.safetensors")
    torch.testing.assert_close(out["logprobs"], case["logprobs"], atol=1e-5, rtol=0)
    alone = load_file(world(1) / name / "one rank" / "out.safetensors")
    if layout != "tp4":  # which cuts sums into four
        assert torch.equal(out["logprobs"], alone["logprobs"])
    for step, (loss, norm) in zip(json.loads((folder / "stats.json").read_text()), case["steps"], strict=True):
        assert step["loss"] == pytest.approx(loss, rel=5e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=5e-5)
    gradients = {key.removeprefix("gradient."): value for key, value in out.items() if key.startswith("gradient.")}
    assert gradients
    for tensor, gradient in gradients.items():
        expected = case["gradients"].get(tensor, alone[f"gradient.{tensor}"])  # transformers has experts in one tensor
        assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max(), tensor
