"""gpt-oss, Gemma 3 and models with sliding windows equal transformers in fp32, on every kind of layout."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests import rows
from tests.distributed.test_layouts import (
    LENGTHS,
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
        "pp2vpp2": {"pp_size": 2, "vpp_size": 2},
        "cp2": {"cp_size": 2},
        "cp2_ep2": {"cp_size": 2, "ep_size": 2},
    },
    4: {
        "tp4": {"tp_size": 4},
        "tp2sp_cp2": {**SP, "cp_size": 2},
        "tp4sp_ep2": {"tp_size": 4, "sequence_parallel": True, "ep_size": 2, "etp_size": 1},
    },
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"family": "gpt_oss", "tied": False, "vocab_size": 343},
    "gemma3": {
        "family": "gemma3_text", "tied": True, "vocab_size": 341, "sliding_window": 5, "layer_types": KINDS,
        "query_pre_attn_scalar": 24, "hidden_size": 60, "head_dim": 10,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "mistral": {"family": "mistral", "tied": False, "vocab_size": 338, "sliding_window": 9},
    "qwen3": {
        "family": "qwen3", "tied": True, "vocab_size": 345, "use_sliding_window": True, "sliding_window": 9,
        "max_window_layers": 2,
    },
}  # fmt: skip
DENSE = ("tp1", "tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "tp4", "tp2sp_cp2")
RUNS = rows.diagonal({  # layouts by model
    "gpt_oss": ("tp1", "tp2sp_ep2", "pp2", "pp2vpp2", "cp2", "cp2_ep2", "tp4sp_ep2"),
    "gemma3": DENSE,
    "mistral": ("tp1", "cp2"),
    "qwen3": ("tp1", "pp2", "tp2sp_cp2"),
})  # fmt: skip
CASES = [
    pytest.param(size, layout, name, marks=[pytest.mark.long] if size == 4 else [], id=f"{layout}-{name}")
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for name in MODELS
    if layout in RUNS[name]
]


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, and the results of transformers."""
    result = {}
    for name, fields in MODELS.items():
        folder = checkpoints(num_hidden_layers=4, attn_implementation="eager", **fields)
        batch = make_batch(fields["vocab_size"])
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, batch)
        steps, gradients = reference_steps(model, batch)
        trained = tmp_path_factory.mktemp("trained")
        model.save_pretrained(trained)
        result[name] = {
            "folder": folder, "batch": batch, "logprobs": logprobs, "steps": steps, "gradients": gradients,
            "weights": load_file(folder / "model.safetensors"), "trained": load_file(trained / "model.safetensors"),
        }  # fmt: skip
    return result


@pytest.fixture(scope="module")
def worlds(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`worlds(ranks)` runs all models and layouts of that many ranks, once, and returns the folder of results."""
    runs = {layout: [name for name in MODELS if layout in RUNS[name]] for sizes in LAYOUTS.values() for layout in sizes}
    return functools.cache(lambda size: run_world(size, cases, tmp_path_factory, LAYOUTS[size], runs))


@pytest.mark.parametrize(("size", "layout", "name"), CASES)
def test_windows_sinks_and_sandwich_norms_agree_with_transformers(
    size: int, layout: str, name: str, cases: dict[str, dict[str, Any]], worlds: Callable[[int], Path]
) -> None:
    case, folder = cases[name], worlds(size) / name / layout
    check_against_files(case, folder, norm=5e-5, gradient=1e-4)
    config = json.loads((folder / "exported" / "config.json").read_text())
    assert config == json.loads((case["folder"] / "config.json").read_text())


def test_windows_matter_at_these_lengths(cases: dict[str, dict[str, Any]]) -> None:
    """The reference attends otherwise without windows, so equal log-probs prove that they are honoured."""
    assert int(LENGTHS.max()) > 9
    for name in ("mistral", "gemma3"):
        config = AutoConfig.from_pretrained(cases[name]["folder"])
        config.sliding_window = 512
        model = AutoModelForCausalLM.from_pretrained(cases[name]["folder"], config=config)
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, cases[name]["batch"])
        assert (logprobs - cases[name]["logprobs"]).abs().max() > 1e-2
