"""`deterministic=true` in each layout of trainer and servers: no bit differs."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from megarl import cli
from megarl.observe.logger import read_metrics
from tests.e2e.test_main_job import Command

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("warm_commands")]
STEPS = 50
SP = ["parallel.tp_size=2", "parallel.sequence_parallel=true"]
ROWS: dict[str, list[str]] = {
    "two servers": ["server.n_servers=2"],
    "trainer tp 2": ["parallel.tp_size=2"],
    "trainer tp 2 sp": SP,
    "server tp 2": ["server.tp_size=2"],
    "trainer tp 2 with server tp 2": ["parallel.tp_size=2", "server.tp_size=2"],
    "trainer tp 2 sp with server tp 2": [*SP, "server.tp_size=2"],
    "trainer cp 2": ["parallel.cp_size=2"],
    "trainer cp 2 with server tp 2": ["parallel.cp_size=2", "server.tp_size=2"],
    "trainer tp 2 sp cp 2": [*SP, "parallel.cp_size=2"],
    "trainer pp 2": ["parallel.pp_size=2"],
    "trainer dp 2 with two servers": ["parallel.dp_size=2", "server.n_servers=2"],
}
EP = ["parallel.dp_size=2", "parallel.ep_size=2"]
LAYOUTS_OF_EXPERTS: dict[str, list[str]] = {
    "one rank": [],
    "trainer ep 2": EP,
    "trainer ep 2 with server tp 2": [*EP, "server.tp_size=2"],
    "trainer tp 2 sp with server tp 2": [*SP, "server.tp_size=2"],
    "trainer tp 2 sp ep 2": [*SP, "parallel.ep_size=2", "parallel.etp_size=1"],
    "trainer cp 2 ep 2": ["parallel.cp_size=2", "parallel.ep_size=2"],
    "trainer pp 2": ["parallel.pp_size=2"],
}
EXPERTS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=False, decoder_sparse_step=1
    ),
    "mixtral": MixtralConfig(num_local_experts=4, num_experts_per_tok=3, intermediate_size=64),
}
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def experts_model(family: str, folder: Path) -> Path:
    """A random mixture of experts in the bundled model's sizes, with its tokenizer."""
    shutil.copytree(cli.ASSETS / "tiny", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tiny, config = AutoConfig.from_pretrained(cli.ASSETS / "tiny"), copy.deepcopy(EXPERTS[family])
    for name in (*SIZES, *TOKENS):
        setattr(config, name, getattr(tiny, name))
    config.num_hidden_layers, config.max_position_embeddings = 2, 512
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("row", ROWS)
def test_no_bit_differs_between_rollout_and_trainer(row: str, tmp_path: Path) -> None:
    check_run(tmp_path, *ROWS[row])


@pytest.mark.parametrize("row", LAYOUTS_OF_EXPERTS)
@pytest.mark.parametrize("family", EXPERTS)
def test_no_bit_differs_with_experts(family: str, row: str, tmp_path: Path) -> None:
    model = experts_model(family, tmp_path / "model")
    reward = "rewards.functions=[tests.e2e.deterministic_reward.score]"
    check_run(tmp_path, f"actor.path={model}", reward, *LAYOUTS_OF_EXPERTS[row])


def check_run(tmp_path: Path, *overrides: str) -> None:
    """Trains with these overrides. Every log-prob of every step must be the servers'."""
    command = Command(
        tmp_path, "+experiment=gsm8k_grpo", "deterministic=true", f"total_train_steps={STEPS}",
        "gconfig.temperature=0.7", "actor.temperature=0.7", "train_dataset.batch_size=8", "evaluator.every_steps=0",
        "actor.optimizer.warmup_steps=0", "evaluator.at_start=false", "evaluator.at_end=false",
        "saver.export_hf=false", *overrides,
    )  # fmt: skip
    assert command.wait() == 0, command.output.read_text()[-3000:]
    metrics = read_metrics(tmp_path / "gsm8k_grpo" / "latest" / "metrics.jsonl")
    steps = [step for step in metrics if "train/logprob_diff_max" in step]
    assert len(steps) == STEPS
    for name in ("train/logprob_diff_max", "train/rollout_kl", "sync/canary_logprob_diff_max"):
        assert [step[name] for step in steps] == [0.0] * STEPS, name
    assert all(step["sync/verified"] == 1 for step in steps)
    # Weights move. A batch of 64 in which all rewards are alike has no gradient.
    assert sum(step["train/grad_norm"] > 0 for step in steps) >= STEPS / 2
