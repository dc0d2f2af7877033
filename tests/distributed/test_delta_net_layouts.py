"""Qwen3-Next and Qwen3.5 equal transformers in fp32, for every layout: log-probs, gradients, steps, weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import rows
from tests.distributed.test_layouts import (
    SP,
    check_against_files,
    make_batch,
    reference_logprobs,
    reference_steps,
    run_world,
)

pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by world size; all layouts of a size run in the same processes
    1: {"tp1": {}},
    2: {
        "tp2": {"tp_size": 2},
        "tp2sp": SP,
        "tp2sp_ep2": {**SP, "ep_size": 2, "etp_size": 1},
        "pp2": {"pp_size": 2},
        "cp2": {"cp_size": 2},
        "cp2_ep2": {"cp_size": 2, "ep_size": 2},
    },
    4: {
        "tp4": {"tp_size": 4},  # more ranks than KV heads
        "cp2_tp2sp": {**SP, "cp_size": 2},
        "cp4": {"cp_size": 4},
        "pp2vpp2_dp2": {"pp_size": 2, "vpp_size": 2, "dp_size": 2},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next_mixed": {"family": "qwen3_next", "tied": False, "vocab_size": 343, "mlp_only_layers": [1]},
    "qwen3_5": {"family": "qwen3_5_text", "tied": True, "vocab_size": 341},
    "qwen3_5_moe": {"family": "qwen3_5_moe_text", "tied": False, "vocab_size": 347},
}
OF_DENSE_MODELS, OF_EXPERTS = ("tp2", "tp4"), ("tp2sp_ep2", "cp2_ep2")
RUNS = rows.diagonal({
    layout: [name for name in MODELS if layout not in (OF_EXPERTS if name == "qwen3_5" else OF_DENSE_MODELS)]
    for layouts in LAYOUTS.values()
    for layout in layouts
})  # fmt: skip
CASES = [
    pytest.param(size, layout, name, marks=[pytest.mark.long] if size == 4 else [], id=f"{size}-{layout}-{name}")
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for name in RUNS[layout]
]


def on_disk(model: Any, values: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Writes values under the names and in the shapes that `save_pretrained` gives the model's parameters."""
    holder = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in holder.named_parameters():
            parameter.copy_(values[name])
    holder.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, and the results of transformers under their names on disk."""
    result = {}
    for name, fields in MODELS.items():
        folder, batch = checkpoints(num_hidden_layers=4, **fields), make_batch(fields["vocab_size"])
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, batch)
        steps, gradients = reference_steps(model, batch)
        result[name] = {
            "folder": folder,
            "batch": batch,
            "logprobs": logprobs,
            "steps": steps,
            "weights": load_file(folder / "model.safetensors"),
            "gradients": on_disk(model, gradients, tmp_path_factory.mktemp("gradients")),
            "trained": on_disk(model, dict(model.named_parameters()), tmp_path_factory.mktemp("trained")),
        }
    return result


@pytest.fixture(scope="module")
def world(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`world(ranks)` runs all layouts of that many ranks, once, and returns the folder with their results."""
    return functools.cache(lambda ranks: run_world(ranks, cases, tmp_path_factory, LAYOUTS[ranks], RUNS))


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_the_actor_agrees_with_transformers(
    ranks: int, layout: str, name: str, cases: dict[str, dict[str, Any]], world: Callable[[int], Path]
) -> None:
    # Log-probs near -5 differ by up to 1.1e-5 on a processor with AVX2 alone.
    check_against_files(cases[name], world(ranks) / name / layout, norm=1e-4, gradient=2e-4, logprob=3e-5)
