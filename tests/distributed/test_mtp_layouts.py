"""Layers of multi-token prediction equal an oracle in float64 under every layout, and leave the model's bits alone."""

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

from megarl.launcher.local import run_ranks
from megarl.types import PackedBatch, cu_seqlens_of
from tests import rows
from tests.distributed.mtp_worker import ADAM, CLIP, FACTOR, STEPS
from tests.distributed.test_layouts import SP
from tests.mtp_oracle import Oracle, add_layers, flat, names_of

pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by world size; all layouts of a size run in the same processes
    1: {"tp1": {}, "recomputed": {"recompute": "full"}, "chunks": {"kept_logits_mb": 0}},
    2: {
        "tp2": {"tp_size": 2},
        "tp2sp": {**SP, "etp_size": 1, "ep_size": 2},
        "pp2": {"pp_size": 2},
        "cp2": {"cp_size": 2},
        "cp2_ep2": {"cp_size": 2, "ep_size": 2},
        "tp2sp_chunks": {**SP, "etp_size": 1, "ep_size": 2, "kept_logits_mb": 0},
        "cp2_chunks": {"cp_size": 2, "kept_logits_mb": 0},
        "dp2": {"dp_size": 2},
        "dp2_overlap": {"dp_size": 2, "overlap": True},
    },
    4: {
        "cp2_pp2": {"cp_size": 2, "pp_size": 2},
        "tp2sp_pp2": {**SP, "pp_size": 2, "etp_size": 1, "ep_size": 2},
        "cp2_tp2sp": {**SP, "cp_size": 2},
        "pp2_dp2_overlap": {"pp_size": 2, "dp_size": 2, "overlap": True},
        "pp2_dp2_overlap_chunks": {"pp_size": 2, "dp_size": 2, "overlap": True, "kept_logits_mb": 0},
        "pp2vpp2_dp2": {"pp_size": 2, "vpp_size": 2, "dp_size": 2},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "glm": {"family": "glm4_moe", "tied": False},
    "glm_2_depths": {"family": "glm4_moe", "tied": False},
    "deepseek": {"family": "deepseek_v3", "tied": False, "num_key_value_heads": 4},
    "qwen3_5": {"family": "qwen3_5_text", "tied": True},
    "qwen3_5_deep": {"family": "qwen3_5_text", "tied": True, "num_hidden_layers": 4},
    "qwen3_5_moe": {"family": "qwen3_5_moe_text", "tied": False},
    "qwen3_next": {"family": "qwen3_next", "tied": False},
}
ALL_RUNS = {
    "tp1": ["glm", "glm_2_depths", "deepseek", "qwen3_5", "qwen3_5_moe", "qwen3_next"],
    "recomputed": ["glm_2_depths"],
    "chunks": ["glm_2_depths", "qwen3_5"],
    "tp2": ["qwen3_5"],
    "tp2sp": ["glm", "qwen3_5_moe"],
    "tp2sp_chunks": ["glm"],
    "cp2_chunks": ["glm_2_depths"],
    "pp2_dp2_overlap_chunks": ["qwen3_5"],
    "pp2": ["glm_2_depths", "qwen3_5"],
    "cp2": ["glm_2_depths", "qwen3_5"],
    "cp2_ep2": ["deepseek"],
    "dp2": ["qwen3_5"],
    "dp2_overlap": ["glm"],
    "cp2_pp2": ["deepseek", "qwen3_5"],
    "tp2sp_pp2": ["glm", "qwen3_5_moe"],
    "cp2_tp2sp": ["glm"],
    "pp2_dp2_overlap": ["glm", "qwen3_5"],
    "pp2vpp2_dp2": ["qwen3_5_deep"],
}
OFTEN = rows.only("glm,qwen3_5", MODELS), rows.only("tp1,chunks,tp2sp,pp2,cp2,dp2_overlap", ALL_RUNS)
RUNS = {
    layout: [name for name in names if name in OFTEN[0] and layout in OFTEN[1]] for layout, names in ALL_RUNS.items()
}
CASES = [
    pytest.param(size, layout, name, marks=[pytest.mark.long] if size == 4 else [], id=f"{layout}-{name}")
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for name in RUNS[layout]
]
LENGTHS = torch.tensor([5, 33, 2, 20, 17, 40, 12, 1, 3])
FIGURES = ("loss", "entropy", "grad_norm", "lr", "skipped_steps")


def make_batch() -> PackedBatch:
    """Sequences of mixed lengths, some too short for a label, with random tokens and mask."""
    generator, total = torch.Generator().manual_seed(3), int(LENGTHS.sum())
    ids = torch.randint(0, 343, (total,), generator=generator)
    mask = torch.rand(total, generator=generator) < 0.7
    return PackedBatch(cu_seqlens_of(LENGTHS), {"input_ids": ids, "loss_mask": mask})


@pytest.fixture(scope="module")
def cases(
    checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """By model: its folder, and the oracle's loss, gradients and weights after a step."""

    @functools.cache
    def case(name: str) -> dict[str, Any]:
        folder = add_layers(
            checkpoints(**MODELS[name]), tmp_path_factory.mktemp("mtp") / name, depths=2 if "2_depths" in name else 1
        )
        oracle, batch = Oracle(folder), make_batch()
        loss = float(oracle.loss(batch).detach())
        gradients = {n: FACTOR * g for n, g in oracle.gradients(batch).items()}
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        before = flat({n: t.double() for n, t in load_file(folder / "model.safetensors").items()})
        after = {n: stepped(before[n], g * min(1.0, CLIP / norm)) for n, g in gradients.items()}
        return {"folder": folder, "loss": loss, "norm": norm, "after": after}

    return case


def stepped(weight: Tensor, gradient: Tensor) -> Tensor:
    """Adam's first step: both moments, corrected, are the gradient and its square."""
    return weight - ADAM["lr"] * gradient / (gradient.abs() + ADAM["adam_eps"])


@pytest.fixture(scope="module")
def world(cases: Callable[[str], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`world(ranks)` runs all layouts of that many ranks, once, and returns the folder with their results."""

    @functools.cache
    def run(ranks: int) -> Path:
        work, logs = tmp_path_factory.mktemp(f"world{ranks}"), tmp_path_factory.mktemp("logs")
        batch = make_batch()
        for name in {name for layout in LAYOUTS[ranks] for name in RUNS[layout]}:
            (work / name).mkdir()
            (work / name / "model").symlink_to(cases(name)["folder"])
            save_file({"cu_seqlens": batch.cu_seqlens, **batch.tokens}, work / name / "batch.safetensors")
        arguments = [str(work), json.dumps(LAYOUTS[ranks]), json.dumps(RUNS)]
        code = run_ranks("tests.distributed.mtp_worker", arguments, ranks, logs)
        assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
        return work

    return run


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_loss_norm_and_step_equal_the_oracle_and_the_model_is_as_without_them(
    ranks: int, layout: str, name: str, cases: Callable[[str], dict[str, Any]], world: Callable[[int], Path]
) -> None:
    case, out = cases(name), world(ranks) / name / layout
    stats = json.loads((out / "stats.json").read_text())
    first = stats["train"][0]
    assert first["mtp_loss"] == pytest.approx(case["loss"], rel=1e-6)
    assert first["mtp_grad_norm"] == pytest.approx(case["norm"], rel=1e-5)
    assert min(first["mtp_grad_norm"], first["grad_norm"]) > CLIP
    after = flat(weights(out / "train_1"))
    for tensor, expected in case["after"].items():
        torch.testing.assert_close(after[tensor].double(), expected, atol=1e-6, rtol=0, msg=tensor)

    for plain, trained in zip(stats["carry"], stats["train"], strict=False):
        assert [plain[k] for k in FIGURES if k in plain] == [trained[k] for k in FIGURES if k in trained]
        assert "mtp_loss" not in plain
    start, carried, trained = (weights(f) for f in (case["folder"], out / f"carry_{STEPS}", out / f"train_{STEPS}"))
    assert start.keys() == carried.keys() == trained.keys()
    prefixes = ("mtp.", *(names["prefix"] for names in names_of(case["folder"])))
    for tensor, value in carried.items():
        if tensor.startswith(prefixes):
            assert torch.equal(value, start[tensor]), tensor
        else:
            assert torch.equal(value, trained[tensor]), tensor
    for tensor, value in trained.items():
        if tensor.endswith((".embed_tokens.weight", ".shared_head.head.weight")) and tensor.startswith(prefixes):
            original = "model.embed_tokens.weight" if "embed" in tensor else "lm_head.weight"
            assert torch.equal(value, trained[original])
            assert not torch.equal(value, start[tensor])

    resumed = weights(out / "resumed")
    assert all(torch.equal(resumed[tensor], value) for tensor, value in trained.items())
    assert stats["train"][-1] == stats["train"][STEPS - 1]
