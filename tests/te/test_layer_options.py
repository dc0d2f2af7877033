"""`actor.fp8` and `parallel.tp_comm_overlap` on the stand-in of Transformer Engine.

The recipe of FP8 reaches every layer, and products have full blocks. With overlap every product fits its buffer. The
stand-in moves nothing in pieces: what it does not show is in its docstring.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.distributed.test_layouts import LENGTHS, make_batch
from tests.te.test_stand_in import ROOT, SP, STAND_IN

pytestmark = pytest.mark.long
RECIPES = {"blockwise": ("Float8BlockScaling", 128), "mxfp8": ("MXFP8BlockScaling", 32)}
CASES: dict[int, list[tuple[str, dict[str, Any], str, str]]] = {  # by ranks: model, layout, recompute, recipe
    1: [
        ("qwen3", {}, "none", "blockwise"),
        ("qwen3", {}, "selective", "mxfp8"),
        ("qwen3", {}, "full", "blockwise"),
        ("qwen3_moe", {}, "none", "blockwise"),
    ],
    2: [
        ("qwen3", SP, "none", "blockwise"),
        ("qwen3", {"cp_size": 2}, "none", "mxfp8"),
        ("qwen3", {"pp_size": 2}, "full", "mxfp8"),
    ],
}
NAMES = [(f"{m}-{'-'.join(layout)}-{r}-{f}", n, f) for n, cases in CASES.items() for m, layout, r, f in cases]
FP8_ERROR = 0.2  # of the spread of log-probs
HIDDEN = 128  # blockwise FP8 gathers features in blocks of it
OVERLAPPED = {"off": 60, "mxfp8": 256}  # tokens of every microbatch, by fp8


@pytest.fixture(scope="module")
def work(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases once, and returns the folder with their facts."""
    folder = tmp_path_factory.mktemp("fp8")
    for name in ("qwen3", "qwen3_moe"):
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(checkpoints(name, tied=False, hidden_size=HIDDEN))
        save_file(make_batch(343), folder / name / "batch.safetensors")
    cases = {
        str(ranks): [
            {
                "name": f"{m}-{'-'.join(layout)}-{r}-{f}",
                "model": m,
                "layout": layout,
                "recompute": r,
                "fp8": f,
                "tp_comm_overlap": False,
            }
            for m, layout, r, f in parts
        ]
        for ranks, parts in CASES.items()
    }
    overlap = {"model": "qwen3", "layout": SP, "recompute": "none", "tp_comm_overlap": True}
    cases["2"] += [{**overlap, "name": f"overlap-{fp8}", "fp8": fp8} for fp8 in OVERLAPPED]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.te.options_worker", str(folder), json.dumps(cases)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{STAND_IN}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return folder


@pytest.mark.parametrize(("name", "ranks", "fp8"), NAMES)
def test_products_have_full_blocks_of_the_recipe(name: str, ranks: int, fp8: str, work: Path) -> None:
    recipe, block = RECIPES[fp8]
    for rank in range(ranks):
        facts = json.loads((work / f"{name}.rank{rank}.json").read_text())
        assert facts["plain"]["rounded"] == []
        rounded = facts["changed"]["rounded"]
        assert {kind for kind, _ in rounded} == {recipe}
        spread = 2 if "sequence_parallel" in name else 1  # rows after the gather; before it a rank has half of them
        assert all(rows % (block * spread) == 0 for _, rows in rounded), rounded
        assert facts["changed"]["entered"] == 0, "a context was left open"


@pytest.mark.parametrize(("name", "ranks", "fp8"), NAMES)
def test_eight_bits_change_little(name: str, ranks: int, fp8: str, work: Path) -> None:
    facts = json.loads((work / f"{name}.rank0.json").read_text())
    plain, quantised = (torch.tensor(facts[key]["logprobs"]) for key in ("plain", "changed"))
    assert len(plain) == int(LENGTHS.sum()), "padding is of no use outside the layers"
    assert 0 < (plain - quantised).abs().mean() < FP8_ERROR * plain.std()
    for before, after in zip(facts["plain"]["stats"], facts["changed"]["stats"], strict=True):
        assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=0.2)
    assert facts["changed"]["dtypes"] == ["torch.bfloat16"], "the weights that servers get"


@pytest.mark.parametrize("fp8", OVERLAPPED)
def test_with_overlap_every_product_fits_its_buffer(fp8: str, work: Path) -> None:
    for rank in range(2):
        facts = json.loads((work / f"overlap-{fp8}.rank{rank}.json").read_text())
        assert facts["plain"]["buffers"] == []
        assert facts["changed"]["buffers"] == [[OVERLAPPED[fp8], HIDDEN]]
        assert f"{OVERLAPPED[fp8]} tokens x hidden size {HIDDEN} (fp8={fp8}), and this one needs " in facts["refused"]
        plain, overlapped = (torch.tensor(facts[kind]["logprobs"]) for kind in ("plain", "changed"))
        assert (plain - overlapped).abs().mean() < (FP8_ERROR * plain.std() if fp8 == "mxfp8" else 1e-6)
        for before, after in zip(facts["plain"]["stats"], facts["changed"]["stats"], strict=True):
            assert after["grad_norm"] == pytest.approx(before["grad_norm"], rel=0.2 if fp8 == "mxfp8" else 1e-2)
