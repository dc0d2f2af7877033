"""Every offline method by its recipe, cut short, on the bundled preferences: its metric on held-out rows improves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl import cli
from megarl.knobs import UserError
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.train import make_folder
from megarl.trainer import preference
from megarl.trainer.inputs import read_inputs
from tests.e2e.test_main_job import Command

# By experiment: steps, and by how much the held-out margin must rise.
RECIPES = {"dpo": (60, 0.02), "ipo": (40, 0.001), "kto": (60, 0.1), "orpo": (40, 0.001), "simpo": (40, 0.02)}
RARER = ("dpo", "ipo", "orpo", "simpo")  # test_methods_layouts.py has the numbers of all
FEW = "train_dataset.split='train[:64]'"
Trained = Callable[..., RunFolder]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """`trained("dpo", "knob=value")`: the folder of a run in this process."""
    root = tmp_path_factory.mktemp("offline")
    done: dict[tuple[str, ...], RunFolder] = {}

    def run(*overrides: str) -> RunFolder:
        if overrides not in done:
            config = cli.load([f"+experiment={overrides[0]}", f"run_root={root}", *overrides[1:]])
            folder = make_folder(config)
            preference.train(config, folder, read_inputs(config, 0), time.monotonic())
            done[overrides] = folder
        return done[overrides]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "datasets")
        yield run


def summary(run: RunFolder) -> dict[str, Any]:
    return json.loads(run.summary.read_text())


@pytest.mark.parametrize("name", ["kto", *(pytest.param(n, marks=pytest.mark.long) for n in RARER)])
def test_the_held_out_margin_rises(name: str, trained: Trained) -> None:
    steps, rise = RECIPES[name]
    run = trained(name, f"total_train_steps={steps}")
    facts = summary(run)
    assert facts["steps"] == steps
    assert facts["margin_after"] > facts["margin_before"] + rise
    assert facts["accuracy_after"] > facts["accuracy_before"]
    assert facts["accuracy_problems"] == 128
    rows = read_metrics(run.metrics)
    assert rows[0]["step"] == 0
    assert all(row["train/skipped_steps"] == 0 and row["train/grad_norm"] > 0 for row in rows[1:])
    assert run.curve.read_bytes().startswith(b"\x89PNG")


def test_methods_with_a_reference_start_where_policy_and_reference_are_one(trained: Trained) -> None:
    for name in ("dpo", "kto"):
        facts = summary(trained(name, f"total_train_steps={RECIPES[name][0]}"))
        assert facts["margin_before"] == pytest.approx(0.0, abs=1e-5)


def test_a_reward_model_fits_its_pairs_and_is_exported_for_scoring(trained: Trained) -> None:
    run = trained("reward", "total_train_steps=40", FEW, "valid_dataset.split='train[:64]'")
    assert summary(run)["accuracy_after"] > 0.6
    assert summary(run)["margin_after"] > summary(run)["margin_before"] == 0.0
    model = AutoModelForSequenceClassification.from_pretrained(run.path / "hf")
    assert model.config.num_labels == 1
    assert model.score.weight.abs().max() > 0


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.path / "hf" / "model.safetensors")


@pytest.mark.parametrize("name", [pytest.param("dpo", marks=pytest.mark.long), "kto"])
def test_log_probs_of_the_reference_stored_or_as_they_come_train_alike_and_a_resume_to_the_same_bits(
    name: str, trained: Trained
) -> None:
    small = ("train_dataset.batch_size=8", FEW, "actor.optimizer.lr_decay_style=constant")
    straight = trained(name, *small, "total_train_steps=6")
    online = trained(name, *small, "total_train_steps=6", "reference.mode=online")
    half = trained(name, *small, "total_train_steps=3")
    resumed = trained(name, *small, "total_train_steps=6", f"resume={half.path}")
    for tensor, value in weights(straight).items():
        torch.testing.assert_close(weights(online)[tensor], value, rtol=0, atol=1e-4)
        assert torch.equal(weights(resumed)[tensor], value), tensor
    assert AutoModelForCausalLM.from_pretrained(straight.path / "hf") is not None


@pytest.mark.long
@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_four_ranks_train_to_the_figures_of_one(name: str, trained: Trained, tmp_path: Path) -> None:
    """Tensor and data parallel, by the command; reference log-probs and KTO's estimate of the KL among it."""
    small = (FEW, "valid_dataset.split='test[:32]'", "train_dataset.batch_size=8", "total_train_steps=4")
    alone = trained(name, *small)
    command = Command(tmp_path, f"+experiment={name}", *small, "parallel.tp_size=2", "parallel.dp_size=2")
    assert command.wait() == 0, command.output.read_text()[-3000:]
    one, four = (read_metrics(run.metrics) for run in (alone, RunFolder((tmp_path / name / "latest").resolve())))
    assert len(four) == len(one) == 5
    for a, b in zip(one, four, strict=True):
        same = {key for key in a if key.startswith(("train/", "eval/"))} - {"train/tokens_per_s"}
        same -= {"train/accuracy", "eval/accuracy"}  # the policy begins as the reference: rounding decides such ties
        assert "train/loss" in same or a["step"] == 0
        assert {key: b[key] for key in same} == pytest.approx({key: a[key] for key in same}, rel=2e-4, abs=1e-5)


def test_a_second_start_reads_the_log_probs_of_the_first(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    trained("dpo", FEW, "total_train_steps=3", "train_dataset.batch_size=8")

    def never(*_: object) -> None:
        raise AssertionError("the start policy is built again")

    monkeypatch.setattr(preference, "start_policy", never)
    again = (FEW, "total_train_steps=4", "train_dataset.batch_size=8")
    assert summary(trained("dpo", *again))["steps"] == 4


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["+experiment=dpo", "algorithm=grpo"], "method=preference: algorithm=grpo learns from rollouts"),
        (["algorithm=dpo"], "method=rl: algorithm=dpo learns from preferences"),
        (["+experiment=dpo", "parallel.dp_size=3"], "batch_size=64 rows are not divided by parallel.dp_size=3"),
        (["+experiment=dpo", "actor.max_tokens_per_mb=100"], "max_length=64 x 2 of a pair = 128 tokens"),
        (["+experiment=dpo", "reference.mode=cached"], "reference.mode=cached must be one of precompute, online"),
        (["+experiment=dpo", "algorithm.beta=0"], "algorithm.beta=0.0 must be above 0"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says.replace("[", r"\[")):
        cli.load(overrides)
