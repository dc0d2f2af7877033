"""Opening lines of a run: the command for a real model passes its checks, and evaluation rows are told right."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from transformers import Qwen2Config

from megarl import cli
from megarl.checks import length_checks, model_checks
from megarl.config import Config
from megarl.data.config import DatasetConfig, SourceConfig
from megarl.knobs import run_all
from megarl.rollout.evaluate import EvaluatorConfig
from megarl.trainer.announce import REAL_DATA, _evaluated, real_command

RECIPES = [
    path.stem for path in sorted(Path(cli.CONFIGS, "experiment").glob("*.yaml")) if "/model:" not in path.read_text()
]
QWEN = Qwen2Config(  # Qwen2.5-0.5B
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
)  # fmt: skip


def printed(*arguments: str) -> list[str]:
    """The words after `python -m megarl.train` in the command of a run with these arguments."""
    words = shlex.split(real_command(cli.load(list(arguments)), arguments))
    assert words[:3] == ["python", "-m", "megarl.train"] or not words
    return words[3:]


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_a_recipe_passes_its_checks_as_printed(name: str) -> None:
    words = printed(f"+experiment={name}")
    if not words:  # its task is an environment, or its model is real
        assert name.startswith("environment_") or "/assets/" not in cli.composed([f"+experiment={name}"]).actor.path
        return
    config = cli.load(words)
    assert config.actor.path.startswith("Qwen/Qwen2.5-")
    assert config.actor.init == "checkpoint"
    assert "assets" not in config.teacher.path
    for data in (config.train_dataset, config.valid_dataset):
        assert not {part.path for part in data.parts()} & set(REAL_DATA)
        assert all("/" in part.path for part in data.parts())
    assert config.experiment_name == name
    run_all([*model_checks(config, QWEN), *length_checks(config, QWEN)])
    assert real_command(config, words) == ""


def test_the_command_keeps_the_users_arguments_and_drops_what_it_replaces() -> None:
    given = ("+experiment=gsm8k_grpo", "data=arithmetic", "experiment_name='my run'", "actor.optimizer.lr=0.1",
             "actor.path=" + str(cli.ASSETS / "tiny"), "gconfig.n_samples=4")  # fmt: skip
    assert printed(*given) == [
        given[0], given[2], given[5], "data=gsm8k", "actor.path=Qwen/Qwen2.5-0.5B-Instruct", "actor.optimizer.lr=1e-6",
    ]  # fmt: skip
    config = cli.load(["+experiment=gsm8k_grpo"])
    assert "resume" not in real_command(config, ["+experiment=gsm8k_grpo", "resume=runs/x"])
    assert " -- data=gsm8k " in real_command(config, ["--from-verl", "trainer.n_gpus_per_node=0"])
    assert real_command(config, ["--from-verl", "a=b", "--", "seed=1"]).count(" -- ") == 1


def test_a_real_model_on_the_bundled_task_gets_the_task_alone() -> None:
    assert printed("+experiment=gsm8k_sft", "actor.path=some/model") == [
        "+experiment=gsm8k_sft", "actor.path=some/model", "data=gsm8k",
    ]  # fmt: skip
    own = ["+experiment=gsm8k_sft", "train_dataset.path=mine.jsonl", "valid_dataset.path=mine.jsonl"]
    assert [word for word in printed(*own) if word.startswith("data=")] == []


def split(*splits: str) -> DatasetConfig:
    return DatasetConfig(sources=[SourceConfig("rows", "main", split) for split in splits])


@pytest.mark.parametrize(
    ("train", "valid", "told"),
    [
        (split("train"), split("test"), "24 to evaluate on, held out from training"),
        (split("train[:75%]"), split("train[75%:]"), "24 to evaluate on, held out from training"),
        (split("train[100:]"), split("train[:100]"), "24 to evaluate on, held out from training"),
        (split("train[:-24]"), split("train[-24:]"), "24 to evaluate on, held out from training"),
        (split("train"), split("train"), "24 to evaluate on, which may be trained on too"),
        (split("train"), split("train[:24]"), "24 to evaluate on, which may be trained on too"),
        (split("train[:100]"), split("train[50:]"), "24 to evaluate on, which may be trained on too"),
        (split("train", "test"), split("test[:24]"), "24 to evaluate on, which may be trained on too"),
        (DatasetConfig(path="one"), DatasetConfig(path="two"), "24 to evaluate on, held out from training"),
    ],
)
def test_rows_are_held_out_only_where_no_step_trains_on_them(
    train: DatasetConfig, valid: DatasetConfig, told: str
) -> None:
    config = dataclasses.replace(Config(), train_dataset=train, valid_dataset=valid)
    assert _evaluated(config, 24) == told
    never = EvaluatorConfig(every_steps=0, at_start=False, at_end=False)
    assert _evaluated(dataclasses.replace(config, evaluator=never), 24) == "no evaluation"
    assert _evaluated(dataclasses.replace(config, evaluator=never, method="sft"), 24) == told
