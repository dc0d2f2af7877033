"""Weights that SGLang arranges on GPUs: Marlin's permutations, and syncs into SGLang's own layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megarl.families.weight_formats import FORMATS
from megarl.ops.quantize import codes_of
from megarl.reshard.sync import marlin_weights
from megarl.reshard.sync.marlin_weights import (
    MarlinLayer,
    MarlinWeights,
    from_marlin,
    packed,
    permuted_scales,
    to_marlin,
)
from tests.held_ports import held_port
from tests.sglang.tiny_models import make_wide, save_quantised

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/sglang/arranged_worker.py"
SIZES = ((64, 128), (128, 128), (192, 512))


def words_of(rows: int, columns: int) -> Tensor:
    codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(rows), dtype=torch.uint8)
    return packed(codes)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_the_arrangements_have_exact_inverses(rows: int, columns: int) -> None:
    words = words_of(rows, columns)
    assert torch.equal(packed(codes_of(words)), words)
    assert to_marlin(words).shape == (columns // 16, rows * 2)
    assert torch.equal(from_marlin(to_marlin(words)), words)
    scales = torch.randn(columns // 128, rows)
    assert torch.equal(permuted_scales(permuted_scales(scales)), scales)
    assert not torch.equal(permuted_scales(scales), scales)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_a_code_goes_where_the_kernel_of_marlin_puts_it(rows: int, columns: int) -> None:
    """By the index arithmetic of `gptq_marlin_repack_kernel` (SGLang 0.5.23), one code at a time."""
    words = words_of(rows, columns)
    codes, arranged = codes_of(words), to_marlin(words)
    for number in range(0, rows * columns, 37):
        row, column = divmod(number, columns)
        tile, of_tile = divmod(row, 64)
        warp, of_warp = divmod(of_tile, 16)
        half, lane_row = divmod(of_warp, 8)
        pair, parity = divmod(column % 8, 2)
        value = 4 * half + 2 * (column % 16 // 8) + parity
        word = int(arranged[column // 16, tile * 128 + (lane_row * 4 + pair) * 4 + warp])
        place = (0, 2, 4, 6, 1, 3, 5, 7).index(value)
        assert word >> 4 * place & 15 == int(codes[row, column])


def test_a_layer_of_one_group_has_its_scales_permuted_in_pairs() -> None:
    layer = MarlinLayer.of(to_marlin(words_of(64, 128)), torch.arange(64.0)[None].clone())
    layer.open()
    assert layer.scales[:10, 0].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    layer.close()


def test_live_weights_that_differ_from_the_sent_ones_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layer = nn.Module(), nn.Module()
    model.layer, layer.scheme = layer, SimpleNamespace(workspace=None)  # as SGLang leaves a layer it has rearranged
    layer.weight_packed = nn.Parameter(to_marlin(words_of(64, 256)), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.rand(2, 64), requires_grad=False)
    weights, sent = MarlinWeights(model), words_of(128, 128).view(64, 32)
    (copies,) = weights.layers.values()
    copies.codes.copy_(sent)
    weights.settle()
    assert torch.equal(copies.codes, sent)
    monkeypatch.setattr(marlin_weights, "to_marlin", lambda words: to_marlin(words ^ 1))
    weights.settle()
    assert torch.equal(copies.codes, sent ^ 1), "their digests show the difference"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "copied", "arranged"), [("int4", 2 * 4, [512 // 16, 256 * 2]), ("fp8_channel", 0, [512, 256])]
)
def test_a_sync_into_sglangs_arranged_layers_leaves_what_a_fresh_load_leaves(
    name: str, copied: int, arranged: list[int], tmp_path: Path
) -> None:
    """SGLang ends each update by arranging the weights once more, which megarl's servers leave out."""
    first, other = (save_quantised(make_wide(seed), tmp_path / str(seed), FORMATS[name]) for seed in (3, 4))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, WORKER, *map(str, (held_port(), first, other))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["arranged"] == [arranged] * 2, "SGLang has rearranged the layers"
    assert report["copied"] == copied
    assert len(report["changed"]) > 2 * 8
    if copied:
        assert report["quantised_before_settling"] == [], "live weights change when all messages have come"
    assert report["unread"] == report["wrong"] == []
    assert report["differing"] == report["moved"] == []
