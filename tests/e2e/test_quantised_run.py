"""GRPO with quantised servers: whole steps on a server that begins without weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl import cli

pytestmark = pytest.mark.long

WIDE = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 256,
}  # fmt: skip


def wide_model(folder: Path) -> Path:
    """The bundled model with random weights in whole blocks, and its tokenizer."""
    shutil.copytree(cli.ASSETS / "tiny", folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    config = AutoConfig.from_pretrained(cli.ASSETS / "tiny")
    for name, size in WIDE.items():
        setattr(config, name, size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


CASES = {
    "fp8, tp1": ("fp8", False, 1),
    "fp8, tp2": ("fp8", False, 2),
    "fp8, aware, tp1": ("fp8", True, 1),
    "fp8_channel, aware, tp2": ("fp8_channel", True, 2),
    "int4, tp2": ("int4", False, 2),
    "int4, aware, tp1": ("int4", True, 1),
}
LARGEST = {"fp8": 0.2, "fp8_channel": 0.2, "int4": 2.0}  # difference of a log-prob, of rounded weights and full ones


@pytest.mark.parametrize("case", CASES)
def test_the_first_batch_is_sampled_with_the_trainers_weights(case: str, tmp_path: Path) -> None:
    quantization, aware, tp_size = CASES[case]
    model = wide_model(tmp_path / "wide")
    command = [
        *(sys.executable, "-m", "megarl.train", "+experiment=gsm8k_grpo", f"actor.path={model}"),
        *(
            f"server.quantization={quantization}",
            "total_train_steps=3",
            f"run_root={tmp_path}",
            "train_dataset.batch_size=8",
        ),
        *("actor.optimizer.warmup_steps=0", "evaluator.at_start=false", "evaluator.at_end=false"),
        *(
            f"parallel.tp_size={tp_size}",
            f"reshard.max_logprob_diff={LARGEST[quantization] / 4}",
            f"server.quantization_aware={aware}",
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = tmp_path / "gsm8k_grpo" / "latest" / "metrics.jsonl"
    steps = [row for row in map(json.loads, metrics.read_text().splitlines()) if "train/logprob_diff_max" in row]
    assert len(steps) == 3
    for step in steps:
        assert step["sync/verified"] == 1
        if aware:
            assert step["train/logprob_diff_max"] < 1e-4, "the trainer computes with the servers' weights"
        else:
            assert 1e-4 < step["train/logprob_diff_max"] < LARGEST[quantization], "rounded weights, but the trainer's"
