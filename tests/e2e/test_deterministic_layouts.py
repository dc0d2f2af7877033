"""`deterministic=true` in each layout of trainer and servers: no bit differs. Long: 50 steps of every row."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.observe.logger import read_metrics
from tests import rows
from tests.e2e.test_main_job import Command

pytestmark = [*rows.marks(), pytest.mark.usefixtures("warm_commands")]
STEPS = 50 if rows.wants_all() else 2
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


@pytest.mark.parametrize("row", rows.only("trainer tp 2 sp with server tp 2", ROWS))
def test_no_bit_differs_between_rollout_and_trainer(row: str, tmp_path: Path) -> None:
    command = Command(
        tmp_path, "+experiment=gsm8k_grpo", "deterministic=true", f"total_train_steps={STEPS}",
        "gconfig.temperature=0.7", "actor.temperature=0.7", "train_dataset.batch_size=8", "evaluator.every_steps=0",
        "actor.optimizer.warmup_steps=0", "evaluator.at_start=false", "evaluator.at_end=false",
        "saver.export_hf=false", *ROWS[row],
    )  # fmt: skip
    assert command.wait() == 0, command.output.read_text()[-3000:]
    metrics = read_metrics(tmp_path / "gsm8k_grpo" / "latest" / "metrics.jsonl")
    steps = [step for step in metrics if "train/logprob_diff_max" in step]
    assert len(steps) == STEPS
    for name in ("train/logprob_diff_max", "train/rollout_kl", "sync/canary_logprob_diff_max"):
        assert [step[name] for step in steps] == [0.0] * STEPS, name
    assert all(step["train/grad_norm"] > 0 and step["sync/verified"] == 1 for step in steps)
