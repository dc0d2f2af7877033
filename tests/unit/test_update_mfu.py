"""`benchmarks/update_mfu.py`: FLOPs against a count by hand, the peak, and a run of the bundled model on the CPU."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import update_mfu
from acceptance.plan import ROOT
from ppo_update import make_batch
from transformers import Qwen3Config, Qwen3MoeConfig

from megarl import cli
from megarl.families import read_config
from megarl.knobs import UserError

# 2 FLOPs a weight and token: q and o of 4 heads of 16, k and v of 2; gate, up and down of 192; the head of 353.
# 2 FLOPs a head, its 16 dimensions and half of all pairs, for scores and for values: 4 * 16 * 4 / 2 of tokens squared.
LINEAR = 2 * (2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192) + 64 * 353)
QUADRATIC = 2 * (4 * 4 * 16 / 2)


def by_hand(lengths: list[int]) -> float:
    """Forward and backward of the bundled model, which has 2 layers of width 64."""
    return 3 * sum(LINEAR * n + QUADRATIC * n * n for n in lengths)


def test_the_flops_of_an_update_are_those_counted_by_hand() -> None:
    tiny = read_config(str(cli.ASSETS / "tiny"))
    assert update_mfu.update_flops(tiny, [3, 100]) == by_hand([3, 100])
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    experts = Qwen3MoeConfig(
        **shape, vocab_size=10, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=6, intermediate_size=999
    )
    dense = Qwen3Config(**shape, vocab_size=10, intermediate_size=12)
    # Two experts of 6 cost what an MLP of 12 does; the router is not counted.
    assert update_mfu.update_flops(experts, [5]) == update_mfu.update_flops(dense, [5])
    assert update_mfu.update_flops(dense, [5]) == 3 * (2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12 + 80) * 5 + 16 * 25)


def test_a_model_is_cut_to_its_first_layers(tmp_path: Path) -> None:
    folder, layers, all_layers = update_mfu.with_layers("Qwen/Qwen3-8B", 8, tmp_path)
    assert (layers, all_layers) == (8, 36)
    assert read_config(str(folder)).num_hidden_layers == 8
    assert update_mfu.with_layers("Qwen/Qwen3-8B", 0, tmp_path)[1:] == (36, 36)
    with pytest.raises(UserError, match=r"--layers 37 is not in 1\.\.36"):
        update_mfu.with_layers("Qwen/Qwen3-8B", 37, tmp_path)


def test_the_peak_is_the_cards_unless_it_is_given() -> None:
    given = ["cluster.gpu_tflops=312"]
    config = cli.composed(given)
    assert update_mfu.peak_tflops(config, given, "NVIDIA H100 80GB HBM3") == 312
    assert update_mfu.peak_tflops(config, [], "NVIDIA H100 80GB HBM3") == 989
    assert update_mfu.peak_tflops(config, [], "NVIDIA B200") == 2250
    with pytest.raises(UserError, match="peak of NVIDIA H100 PCIe is not known here"):
        update_mfu.peak_tflops(config, [], "NVIDIA H100 PCIe")


@pytest.mark.long
@pytest.mark.cpu_options("the bundled model's layers on the CPU")
def test_an_update_on_the_cpu_gives_the_share_of_the_peak_that_its_time_says(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    sizes = {"prompts": 2, "samples": 2, "prompt": 16, "completion": 16, "max-new": 32}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [*options, "--warm", "1", "--updates", "1", "--layers", "1", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "update_mfu.py"), *command, "cluster.gpu_tflops=0.5"],
        capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 of 2 layers" in done.stdout
    found = {figure["figure"]: figure["value"] for figure in map(json.loads, figures.read_text().splitlines())}
    args = argparse.Namespace(**{name.replace("-", "_"): value for name, value in sizes.items()}, vocab=353)
    lengths = make_batch(args, seed=1)[0].lengths.tolist()  # of the update behind the warm one
    one_layer = 3 * sum((LINEAR + 2 * 64 * 353) / 2 * n + QUADRATIC / 2 * n * n for n in lengths)
    assert found["FLOPs of an update"] == one_layer
    assert found["MFU"] == pytest.approx(one_layer / found["time of an update"] / 0.5e12)
    assert found["update speed"] == pytest.approx(sum(lengths) / found["time of an update"])
    assert found["layers"] == 1
