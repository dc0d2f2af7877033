"""Whole runs with each source of a teacher, and the loss of a teacher's server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl import cli
from megarl.observe.logger import read_metrics
from megarl.rollout.client.scoring import Query, Scorer, TeacherLostError
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers

TEACHER = cli.ASSETS / "tiny_teacher"
LIMIT_S = 900
SHORT = (
    "total_train_steps=2", "actor.optimizer.warmup_steps=0", "evaluator.every_steps=0", "train_dataset.batch_size=8",
    "saver.export_hf=false", "evaluator.n_samples=1",
)  # fmt: skip
TOP_K = "algorithm.divergence=top_k"
RUNS = {
    "a frozen model": (),
    "sampled, with rewards": ("algorithm.divergence=sampled", "algorithm.reward_coef=0.5"),
    "servers that answer half of the prompts": (
        "teacher.source=server", TOP_K, "algorithm.lmbda=0.5", "algorithm.beta=0.5"
    ),
    "the policy with a hint": (
        "teacher.source=policy", "teacher.path=''", TOP_K, "teacher.hint='It is {answer}.'",
        "teacher.max_prompt_tokens=128",
    ),
    "supervised": ("method=sft", "algorithm.data_coef=0.5"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("case", RUNS)
def test_a_run_learns_from_its_teacher(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.train", "+experiment=opd", *SHORT, *RUNS[case], f"run_root={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [row for row in read_metrics(tmp_path / "opd" / "latest" / "metrics.jsonl") if row["step"] > 0]
    key = "train/teacher_kl" if case.startswith("sampled") else "train/teacher_divergence"
    assert len(rows) == 2
    assert all(0 < row[key] < 30 for row in rows), rows
    if case == "servers that answer half of the prompts":
        assert all(row["train/logprob_diff_max"] < 1e-3 for row in rows), "the teacher's tokens are not compared"


@pytest.mark.long
def test_a_teachers_answers_become_a_data_set(tmp_path: Path) -> None:
    rows = ["valid_dataset.split='train[:8]'", "evaluator.n_samples=2", "experiment_name=teacher"]
    answers = tmp_path / "teacher_evaluate" / "latest" / "evaluations" / "step-000000.jsonl"
    data = [f"train_dataset.path={answers}", "train_dataset.name=''", "train_dataset.type=samples", "method=sft"]
    for module, changes in (("evaluate", [f"actor.path={TEACHER}", *rows]), ("train", [*SHORT, *data])):
        command = [sys.executable, "-m", f"megarl.{module}", "+experiment=opd", *changes, f"run_root={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(answers.read_text().splitlines()) == 16
    steps = [row for row in read_metrics(tmp_path / "opd" / "latest" / "metrics.jsonl") if row["step"] > 0]
    assert len(steps) == 2
    assert all(0 < row["train/teacher_divergence"] < 30 for row in steps), steps


@pytest.mark.long
def test_a_servers_log_probs_are_the_models_and_its_loss_is_told(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    ids = [[5, 6, 7, 8, 9, 10], [40, 41, 42], [7] * 40]
    with SGLangServers(SGLangServerConfig(max_total_tokens=16384), TEACHER, tmp_path) as servers:
        servers.start()
        servers.wait_ready()
        scorer = Scorer(servers.addresses, servers.api_key, 4, 60.0, 0.5)
        try:
            for ids_of, scores in zip(ids, scorer.score([Query(row, 2) for row in ids], 3), strict=True):
                with torch.no_grad():
                    table = model(torch.tensor([ids_of])).logits[0].log_softmax(-1)[1:-1]
                expected = table.gather(1, torch.tensor(ids_of[2:])[:, None]).squeeze(1)
                torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=1e-4, atol=1e-4)
                top, places = table.topk(3, 1)
                assert scores.top_ids == places.tolist()
                torch.testing.assert_close(torch.tensor(scores.top_logprobs), top, rtol=1e-4, atol=1e-4)
            servers.stop()
            with pytest.raises(TeacherLostError, match=r"is lost .* teacher\.wait_s=0\.5 s; start it again"):
                scorer.score([Query(ids[0], 2)], 0)
        finally:
            scorer.close()


def test_the_bundled_teacher_is_larger_than_the_student_and_has_its_tokenizer() -> None:
    student = cli.ASSETS / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TEACHER / name).read_bytes() == (student / name).read_bytes()
    sizes = [json.loads((folder / "config.json").read_text())["hidden_size"] for folder in (TEACHER, student)]
    assert sizes[0] > sizes[1]
