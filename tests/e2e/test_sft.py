"""Supervised training by the real command: the bundled checkpoint can be made again, and a resume is bitwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl import cli
from megarl.observe.run_folder import RunFolder
from tests.e2e.test_main_job import Command, steps_in

TINY = Path(cli.ASSETS) / "tiny"


def trained(root: Path, *arguments: str) -> RunFolder:
    command = Command(root, "+experiment=gsm8k_sft", *arguments)
    assert command.wait() == 0, command.output.read_text()[-3000:]
    return RunFolder((root / "gsm8k_sft" / "latest").resolve())


@pytest.fixture(scope="module")
def made_again(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("again"))


def test_the_bundled_checkpoint_is_made_by_the_command_it_names(made_again: RunFolder) -> None:
    assert "+experiment=gsm8k_sft" in (TINY / "README.md").read_text()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (made_again.path / "hf" / name).read_bytes() == (TINY / name).read_bytes(), name
    bundled, again = load_file(TINY / "model.safetensors"), load_file(made_again.path / "hf" / "model.safetensors")
    assert bundled.keys() == again.keys()
    # Other processors and other orders of the same sums round differently: a difference of 1e-7 in the third step has
    # grown to 1e-2 in the loss of the sixtieth. What the steps teach stays the same.
    for name, tensor in bundled.items():
        cosine = torch.nn.functional.cosine_similarity(tensor.flatten(), again[name].flatten(), dim=0)
        assert cosine > 0.7, f"{name}: {cosine}"
    assert json.loads(made_again.summary.read_text())["final_loss"] < 0.5


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    shared = ["train_dataset.batch_size=8"]
    straight = trained(tmp_path / "a", *shared, "total_train_steps=8")
    half = trained(tmp_path / "b", *shared, "total_train_steps=5")
    resumed = trained(tmp_path / "b", *shared, "total_train_steps=8", f"resume={half.path}")
    assert resumed.path == half.path
    assert "total_train_steps: 5" in resumed.config.read_text()
    assert steps_in(resumed) == list(range(1, 9))
    first, second = (load_file(run.path / "hf" / "model.safetensors") for run in (straight, resumed))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_four_ranks_train_to_the_same_loss(tmp_path: Path) -> None:
    shared = ["train_dataset.batch_size=8", "total_train_steps=4", "saver.export_hf=false"]
    alone = trained(tmp_path / "one", *shared)
    ranks = trained(tmp_path / "four", *shared, "parallel.tp_size=2", "parallel.dp_size=2")
    losses = [json.loads(run.summary.read_text())["final_loss"] for run in (alone, ranks)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert (ranks.logs / "rank_3.log").exists()
