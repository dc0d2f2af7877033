"""`deterministic=true`: log-probs of a real server and of the actor are equal in every bit, at every step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megarl import cli
from megarl.knobs import UserError
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import new_run
from megarl.trainer import rl
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts.logprob_check import LogprobMismatchError, check_equal_logprobs

STEPS = 4


def test_no_bit_differs_between_rollout_and_trainer(tmp_path: Path) -> None:
    """At a temperature that float32 does not hold exactly, with weights that move, and completions of all lengths."""
    threads = torch.get_num_threads()
    config = cli.load(
        [
            "+experiment=gsm8k_grpo", "deterministic=true", f"total_train_steps={STEPS}", f"run_root={tmp_path}",
            "gconfig.temperature=0.7", "actor.temperature=0.7", "train_dataset.batch_size=16",
            "evaluator.every_steps=0", "evaluator.at_start=false", "saver.export_hf=false",
        ]
    )  # fmt: skip
    folder = new_run(config.run_root, "deterministic")
    rl.train(config, folder, read_inputs(config, 0), time.time())
    torch.set_num_threads(threads)
    rows = [row for row in read_metrics(folder.path / "metrics.jsonl") if "train/logprob_diff_max" in row]
    assert len(rows) == STEPS
    assert [row["train/logprob_diff_max"] for row in rows] == [0.0] * STEPS
    assert [row["train/rollout_kl"] for row in rows] == [0.0] * STEPS
    assert [row["sync/canary_logprob_diff_max"] for row in rows] == [0.0] * STEPS
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert "operations whose bits do not depend on the batch" in (folder.logs / "sglang-0.log").read_text()


def test_one_bit_stops_the_run() -> None:
    sampled = torch.tensor([-0.5, -1.25])
    check_equal_logprobs(sampled, sampled.clone())
    other = torch.nextafter(sampled, torch.zeros(2))
    with pytest.raises(LogprobMismatchError, match="2 of 2 log-probs differ between rollout and trainer"):
        check_equal_logprobs(other, sampled)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("server.tp_size=3", "server.tp_size=3 must be a power of two with deterministic=true"),
        ("server.dtype=bfloat16", "server.dtype=bfloat16 must be float32"),
        ("server.cpu_threads=2", "server.cpu_threads=2 must be 1"),
        ("server.device=cuda", "whose servers are on devices like the trainer's, which has no GPU"),
    ],
)
def test_servers_that_would_not_be_exact_are_refused(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        cli.load(["+experiment=gsm8k_grpo", "deterministic=true", override])


def test_a_run_without_rollouts_is_refused() -> None:
    with pytest.raises(UserError, match="deterministic=true is about rollouts, which method=sft has none of"):
        cli.load(["+experiment=gsm8k_sft", "deterministic=true"])
