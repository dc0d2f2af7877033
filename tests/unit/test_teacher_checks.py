"""Mistakes about a teacher are refused in one line before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl import cli
from megarl.knobs import UserError
from megarl.trainer.inputs import read_inputs

OPD = "+experiment=opd"
SAMPLED, TOP_K = "algorithm.divergence=sampled", "algorithm.divergence=top_k"
NO_PATH = "teacher.path=''"
HINT = ["teacher.source=policy", NO_PATH, "teacher.hint='It is {answer}.'", "teacher.max_prompt_tokens=64", TOP_K]

REFUSED: list[tuple[list[str], str]] = [
    (["teacher.source=none"], "algorithm=opd has no teacher"),
    ([NO_PATH], "teacher.source=trainer needs teacher.path"),
    (["teacher.source=server", NO_PATH, TOP_K], "teacher.source=server needs teacher.path"),
    (["algorithm.beta=1.5"], "algorithm.beta=1.5 must be"),
    (["algorithm.beta=-0.1"], "algorithm.beta=-0.1 must be"),
    (["algorithm.teacher_coef=0"], "learns nothing from the teacher"),
    ([SAMPLED, "algorithm.beta=0.5"], "algorithm.beta=0.5 needs the teacher's distribution"),
    ([SAMPLED, "algorithm.lmbda=0.5"], "trains on the teacher's samples too"),
    (["algorithm.lmbda=0.5"], "teacher.source=trainer cannot sample"),
    (["teacher.source=server"], "algorithm.divergence=full needs the teacher's logits"),
    (["teacher.addresses=[127.0.0.1:1]"], "teacher.addresses are for teacher.source=server"),
    (["teacher.source=server", TOP_K, "actor.temperature=0.5", "gconfig.temperature=0.5"], "at temperature 1"),
    (["teacher.source=server", TOP_K, "server.colocate=true"], "start the teacher elsewhere"),
    (["teacher.source=server", TOP_K, "launcher=slurm"], "launcher=slurm starts no teacher"),
    (
        ["teacher.source=server", TOP_K, "cluster.gpus_per_node=8", "parallel.dp_size=4", "teacher.tp_size=4"],
        "teacher.n_servers=1 x teacher.tp_size=4 beside 4 trainer ranks and 1 server ranks need 9 GPUs of one machine",
    ),
    (["deterministic=true", "teacher.source=server", TOP_K], "deterministic=true does not cover teacher.source=server"),
    (["deterministic=true"], "deterministic=true holds for algorithm.divergence=sampled"),
    (["teacher.source=policy", TOP_K], "so teacher.path is not read"),
    (["teacher.source=policy", NO_PATH, TOP_K], "the student would be its own teacher"),
    (["teacher.hint=x"], "algorithm.divergence=full reads"),
    ([*HINT, "rollout.workflow=multi_turn"], "stands in a prompt of one turn"),
    ([*HINT, "teacher.hint='{0}'"], "which is no column"),
    ([*HINT, "teacher.hint='{'"], "cannot be read"),
    ([*HINT, "teacher.max_prompt_tokens=0"], "needs teacher.max_prompt_tokens"),
    ([*HINT, "teacher.max_prompt_tokens=16384"], "raise it to at least 16408"),
    (["method=sft", SAMPLED], "compares tokens that the student sampled"),
    (["method=sft", *HINT], "method=sft has none"),
    (["method=sft", "teacher.source=server", TOP_K, "algorithm.lmbda=0.5"], "method=sft samples nothing"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_knobs_that_contradict_each_other_are_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        cli.load([OPD, *overrides])
    text = str(refused.value)
    assert message in text
    assert "\n" not in text


def test_a_teacher_without_its_algorithm_is_refused() -> None:
    with pytest.raises(UserError, match="algorithm=grpo has no teacher"):
        cli.load(["+experiment=gsm8k_grpo", "teacher.source=trainer"])


def changed_teacher(folder: Path, vocabulary: bool = False, **fields: Any) -> str:
    """A copy of the bundled teacher without weights, with another config or another vocabulary."""
    source = Path(cli.ASSETS / "tiny_teacher")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    if vocabulary:
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokenizer.add_tokens(["<hmm>"])
        tokenizer.save_pretrained(folder)
    return f"teacher.path={folder}"


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"vocabulary": True, "vocab_size": 360}, [], "has another tokenizer: 1 tokens differ, such as '<hmm>'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, ["parallel=tp2"], "does not fit the trainer's ranks"),
        ({"max_position_embeddings": 64}, [], "max_position_embeddings=64, below sequences of 88"),
        ({}, [TOP_K, "algorithm.top_k=354"], "algorithm.top_k=354 exceeds the vocabulary of 353"),
        ({"vocab_size": 100}, [], "has a vocabulary of 100"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    fields: dict[str, Any], overrides: list[str], message: str, tmp_path: Path
) -> None:
    config = cli.load([OPD, changed_teacher(tmp_path / "teacher", **fields), *overrides])
    with pytest.raises(UserError) as refused:
        read_inputs(config, rank=1)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_teacher_that_does_not_exist_is_refused_by_its_own_knob(tmp_path: Path) -> None:
    config = cli.load([OPD, f"teacher.path={tmp_path / 'none'}"])
    with pytest.raises(UserError, match=r"^teacher\.path="):
        read_inputs(config, rank=1)


def test_padding_of_the_vocabulary_may_differ(tmp_path: Path) -> None:
    config = cli.load([OPD, changed_teacher(tmp_path / "teacher", vocab_size=384)])
    inputs = read_inputs(config, rank=1)
    assert inputs.teacher is not None
    assert (inputs.vocab_size, inputs.teacher.vocab_size) == (353, 384)


def test_a_hint_with_a_column_that_prompts_lack_is_refused() -> None:
    config = cli.load([OPD, *HINT, "teacher.hint='{solution}'"])
    with pytest.raises(UserError, match="names the column solution, which prompts lack, with answer, messages"):
        read_inputs(config, rank=0)
