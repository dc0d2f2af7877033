"""The main job, shorter: the real command, Megatron, a real SGLang server, the bundled model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megarl import cli
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder, new_run
from megarl.reshard.sync.coordinator import WeightSyncError
from megarl.reshard.transfer.transports.gloo import GlooTransport
from megarl.rollout.servers.sglang_server import still_running
from megarl.trainer import rl
from megarl.trainer.inputs import read_inputs
from tests.conftest import random_model

ASSETS = Path(cli.ASSETS)
DEADLINE_S = 900.0  # for a run that hangs: on slow machines one takes minutes
LOGPROB_DIFF = 3e-4  # rounding; up to 3.9e-5 was seen
STEPS = 32  # the last quarter is above the first by 0.16 and 0.18 (two runs); in 16 steps a rise was a matter of luck


# Lines of torch's stores and process groups, and its warnings about deprecated names of collectives.
NOISE = re.compile(r"c10d|TCPStore|ProcessGroup\w*\.cpp|^\S*\[W\d{4} |FutureWarning", re.MULTILINE)


class Command:
    """`python -m megarl.train`, or another command, in a process of its own, its output kept."""

    def __init__(self, root: Path, *arguments: str, module: str = "megarl.train") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.output = root / f"output-{time.monotonic_ns()}.txt"
        command = [sys.executable, "-m", module, *arguments, f"run_root={root}"]
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.kill()

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S} s:\n{self.output.read_text()[-3000:]}"
            time.sleep(0.1)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(300)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def steps_in(run: RunFolder) -> list[int]:
    return [int(row["step"]) for row in read_metrics(run.metrics)] if run.metrics.exists() else []


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """A GRPO run of `STEPS` steps, and what it printed."""
    root = tmp_path_factory.mktemp("short")
    evaluations = ("evaluator.every_steps=0", "evaluator.n_samples=1")
    command = Command(root, "+experiment=gsm8k_grpo", f"total_train_steps={STEPS}", *evaluations)
    code = command.wait()
    text = command.output.read_text()
    assert code == 0, text[-3000:]
    return RunFolder((root / "gsm8k_grpo" / "latest").resolve()), text


def test_the_reward_rises_and_every_sync_is_proven(short_run: tuple[RunFolder, str]) -> None:
    run, _ = short_run
    rows = read_metrics(run.metrics)
    trained = [row for row in rows if row["step"] > 0]
    assert [int(row["step"]) for row in rows] == list(range(STEPS + 1))
    rewards = [row["rollout/reward"] for row in trained]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.05, rewards
    assert all(row["sync/verified"] == 1 for row in trained)
    assert max(row["train/logprob_diff_max"] for row in trained) <= LOGPROB_DIFF
    assert all(row["rollout/staleness"] == 0 for row in trained)


def test_the_run_says_what_it_does_and_leaves_what_it_promises(short_run: tuple[RunFolder, str]) -> None:
    run, text = short_run
    for fact in (
        "bundled tiny one",
        "32 prompts x 8 completions = 256 sequences",
        "1 SGLang server",
        "data=gsm8k",
        "before",
    ):
        assert fact in text
    assert not NOISE.search(text)
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == summary["weights_verified"] == STEPS
    assert summary["accuracy_problems"] >= 200
    assert 0 < summary["time_to_first_step_s"] < summary["wall_s"]
    for key in ("accuracy_before", "accuracy_after", "tokens_per_s_rollout", "tokens_per_s_train"):
        assert summary[key] > 0
    assert summary["max_rollout_train_logprob_diff"] <= LOGPROB_DIFF
    assert run.curve.read_bytes().startswith(b"\x89PNG")
    assert "experiment_name: gsm8k_grpo" in run.config.read_text()
    assert list(run.tensorboard.iterdir())
    assert (run.logs / "sglang-0.log").stat().st_size > 0
    before, after = load_file(ASSETS / "tiny" / "model.safetensors"), load_file(run.path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    lines = (run.path / "evaluations" / f"step-{STEPS:06}.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert {s["versions"][0] for s in samples} == {STEPS}


@pytest.mark.long
def test_two_ranks_stop_in_order_resume_and_leave_nothing_when_killed(tmp_path: Path) -> None:
    arguments = ["+experiment=gsm8k_grpo", "parallel=tp2", "train_dataset.batch_size=8", "evaluator.at_start=false"]
    first = Command(tmp_path, *arguments)
    run = RunFolder(tmp_path / "gsm8k_grpo" / "latest")
    first.wait_for(lambda: len(steps_in(run)) >= 2, "second step")
    os.killpg(first.process.pid, signal.SIGTERM)  # as a supervisor does
    assert first.wait() == 0, first.output.read_text()[-3000:]
    stopped = json.loads(run.summary.read_text())["steps"]
    assert "stopping after this step with a checkpoint" in first.output.read_text()
    assert not NOISE.search(first.output.read_text())
    assert steps_in(run) == list(range(1, stopped + 1))
    assert [p.name for p in run.checkpoints.iterdir()] == [f"step_{stopped:06d}"]

    second = Command(tmp_path, *arguments, f"resume={run.path}")
    second.wait_for(lambda: len(steps_in(run)) >= stopped + 2, "two steps after the resume")
    family = second.family()
    assert len(family) >= 4, "two ranks, a server and its children"
    os.kill(second.process.pid, signal.SIGKILL)
    assert still_running(family, 300) == []
    second.process.wait(300)
    assert steps_in(run) == list(range(1, len(steps_in(run)) + 1))


def corrupt_second_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips a bit of the second message by gloo, after its digest is taken: that of the second sync."""
    send: Any = GlooTransport.send
    sent: list[int] = []

    def corrupting(self: GlooTransport, slot: int, nbytes: int, peer: int, tag: int) -> Any:
        sent.append(nbytes)
        if len(sent) == 2:
            assert self.staging is not None
            self.staging.slots[slot][nbytes // 2] ^= 1
        return send(self, slot, nbytes, peer, tag)

    monkeypatch.setattr(GlooTransport, "send", corrupting)


def test_a_tensor_corrupted_on_its_way_stops_the_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cli.load(
        ["+experiment=gsm8k_grpo", "train_dataset.batch_size=4", "evaluator.at_start=false", "total_train_steps=5"]
    )
    corrupt_second_message(monkeypatch)
    run = new_run(tmp_path, "corrupted")
    with pytest.raises(WeightSyncError) as error:
        rl.train(config, run, read_inputs(config, rank=0), started=time.monotonic())
    assert error.value.tensor.startswith("model.")
    assert error.value.tensor in str(error.value)
    assert steps_in(run) == [1]


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_another_model_and_other_data_run_through_the_same_command(family: str, tmp_path: Path) -> None:
    """A sharded checkpoint by transformers, a GSM8K folder by datasets; the random model earns nothing, but agrees."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    model = random_model(family, tied=False, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=1)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"Leo has {i % 9 + 1} pens. How many?", "answer": f"#### {i % 9 + 1}"} for i in range(24)]
    for split in ("train", "test"):
        (tmp_path / "data" / "main").mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / "main" / f"{split}-00000-of-00001.parquet")
    command = Command(
        tmp_path, "+experiment=gsm8k_grpo", f"actor.path={tmp_path / 'model'}", "train_dataset.batch_size=8",
        f"train_dataset.path={tmp_path / 'data'}", f"valid_dataset.path={tmp_path / 'data'}", "total_train_steps=3",
        "evaluator.n_samples=1",
    )  # fmt: skip
    assert command.wait() == 0, command.output.read_text()[-3000:]
    summary = json.loads((tmp_path / "gsm8k_grpo" / "latest" / "summary.json").read_text())
    assert summary["weights_verified"] == 3
    assert summary["max_rollout_train_logprob_diff"] <= LOGPROB_DIFF
    assert summary["accuracy_problems"] == len(rows)
