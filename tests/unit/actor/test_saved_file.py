"""A file that a network's file system could not store is no file: checkpoints and log-probs keep their old ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from megarl.actor.weights import hf_files, peft_files, saved_file
from megarl.families import Adapters
from megarl.knobs import UserError
from megarl.trainer import reference_logprobs

TENSORS = {"weight": torch.arange(6.0).view(2, 3)}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota that is told of at the flush, when `save_file` has ended well."""

    def fsync(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fsync)


def test_it_holds_what_was_given_and_all_may_read_it(tmp_path: Path) -> None:
    saved_file.save(TENSORS, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["weight"], TENSORS["weight"])
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.usefixtures("full")
def test_weights_that_were_not_stored_replace_none(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    source = checkpoints("qwen3", tied=True)
    weights = load_file(source / "model.safetensors")
    save_file({"old": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="quota"):
        hf_files.write(tmp_path, weights.items(), AutoConfig.from_pretrained(source), source)
    assert [*load_file(tmp_path / "model.safetensors")] == ["old"]


@pytest.mark.usefixtures("full")
def test_adapters_that_were_not_stored_have_no_config(tmp_path: Path) -> None:
    tensors = {"layers.0.q_proj.lora_A.weight": torch.ones(4, 8)}
    with pytest.raises(OSError, match="quota"):
        peft_files.write(tmp_path, tensors, Adapters(4, ("q_proj",), 8.0), 0.0, "base")
    assert not (tmp_path / peft_files.CONFIG).exists()


@pytest.mark.usefixtures("full")
def test_log_probs_of_a_reference_that_were_not_stored_are_read_by_no_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.reference.safetensors"
    with pytest.raises(UserError, match=r"cannot be written .*quota.*; set XDG_CACHE_HOME"):
        reference_logprobs._write(path, TENSORS)
    assert not path.exists()
