"""Kept batches come back bit for bit, in a ring of bounded length and size; damaged ones are told from whole ones."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.config import Config
from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder
from megarl.preflight.invariance import batch as random_batch
from megarl.trainer.checkpoints.manifest import Damaged
from megarl.trainer.replay import kept_batches
from megarl.trainer.replay.kept_batches import BatchRing, KeepError, kept_steps, read_batch, read_facts
from megarl.trainer.replay.source import find
from megarl.types import PackedBatch


def config_of(*overrides: str) -> Config:
    return cli.load(["+experiment=gsm8k_grpo", "saver.keep_batches=3", *overrides])


def rich_batch() -> PackedBatch:
    batch = random_batch()
    batch.set_tokens("ids_of_experts", torch.arange(2 * batch.total_tokens).to(torch.int16).view(-1, 2))
    batch.set_tokens("half", torch.randn(batch.total_tokens).bfloat16())
    batch.set_sequences("nothing", torch.zeros(batch.num_seqs, 0))
    return batch


def test_a_batch_comes_back_with_every_bit_and_kind(tmp_path: Path) -> None:
    batch = rich_batch()
    BatchRing(config_of("algorithm=dapo"), tmp_path / "batches", print).keep(7, batch)
    (path,) = kept_steps(tmp_path / "batches").values()
    read, facts = read_batch(path), read_facts(path)
    assert (facts.step, facts.algorithm, facts.config["method"]) == (7, "dapo", "rl")
    assert read.bounds == batch.bounds
    for mine, theirs in ((read.tokens, batch.tokens), (read.sequences, batch.sequences)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype == theirs[name].dtype
            assert torch.equal(value, theirs[name]), name


def test_the_ring_has_the_last_batches_within_its_length_and_size(tmp_path: Path) -> None:
    ring = BatchRing(config_of(), tmp_path / "batches", print)
    for step in range(1, 6):
        ring.keep(step, random_batch())
    assert list(kept_steps(ring.folder)) == [3, 4, 5]
    size = sum(t.nbytes for t in kept_batches._tensors(random_batch()).values())
    notes: list[str] = []
    room = 2 * kept_steps(ring.folder)[5].stat().st_size + size // 2  # for two files, and not for another batch
    BatchRing(config_of(f"saver.batches_gb={room / 1e9}"), ring.folder, notes.append).keep(6, random_batch())
    assert list(kept_steps(ring.folder)) == [5, 6]
    ring = BatchRing(config_of(f"saver.batches_gb={2.5 * size / 1e9}"), ring.folder, notes.append)
    ring.keep(7, random_batch())
    assert list(kept_steps(ring.folder)) == [7], "files are larger than their tensors"
    BatchRing(config_of(f"saver.batches_gb={0.5 * size / 1e9}"), ring.folder, notes.append).keep(8, random_batch())
    assert list(kept_steps(ring.folder)) == [7]
    assert "step 8" in notes[0]
    assert "saver.batches_gb" in notes[0]


def test_a_resumed_run_forgets_the_steps_that_it_takes_anew(tmp_path: Path) -> None:
    ring = BatchRing(config_of(), tmp_path / "batches", print)
    for step in (1, 2, 3):
        ring.keep(step, random_batch())
    (ring.folder / "step_000004.safetensors.writing").touch()
    ring.forget_after(2)
    assert sorted(p.name for p in ring.folder.iterdir()) == ["step_000001.safetensors", "step_000002.safetensors"]


@pytest.mark.parametrize("place", [-1, 200, 2])
def test_a_changed_byte_is_found(place: int, tmp_path: Path) -> None:
    ring = BatchRing(config_of(), tmp_path / "batches", print)
    ring.keep(1, random_batch())
    (path,) = kept_steps(ring.folder).values()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged):
        read_batch(path)


def test_a_full_disk_is_named_and_leaves_no_half_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_batches.saved_file, "save", full)
    ring = BatchRing(config_of(), tmp_path / "batches", print)
    with pytest.raises(KeepError, match=r"batch of step 1 could not be written to .*step_000001") as caught:
        ring.keep(1, random_batch())
    assert "free space there" in cli._full_disk(caught.value)
    assert list(ring.folder.iterdir()) == []


# -- the states that kept batches lead from --------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text("")
    return folder


def test_a_run_without_batches_and_a_folder_that_is_no_run_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kept no batches; train with saver\.keep_batches"):
        find(run, 1)
    with pytest.raises(UserError, match="is no run"):
        find(RunFolder(tmp_path / "other"), 1)


def test_a_step_without_a_way_from_a_state_is_refused_with_the_steps_that_have_one(run: RunFolder) -> None:
    ring = BatchRing(config_of("saver.keep_batches=9"), run.batches, print)
    for step in (1, 2, 4, 5):
        ring.keep(step, random_batch())
    assert find(run, 2).start == 0
    assert [path.stem for path in find(run, 2).batches] == ["step_000001", "step_000002"]
    with pytest.raises(UserError, match=r"step=5: .* the newest one is the run's start, .*replayed: 1-2$"):
        find(run, 5)
    with pytest.raises(UserError, match=r"step=3: the run kept the batches of steps 1-2, 4-5; .*replayed: 1-2$"):
        find(run, 3)


def test_batches_of_two_configurations_are_no_way(run: RunFolder) -> None:
    BatchRing(config_of(), run.batches, print).keep(1, random_batch())
    BatchRing(config_of("actor.optimizer.lr=1e-4"), run.batches, print).keep(2, random_batch())
    with pytest.raises(UserError, match="not all kept under one configuration"):
        find(run, 2)
    BatchRing(config_of("resume=runs/x"), run.batches, print).keep(2, random_batch())
    assert find(run, 2).start == 0, "a resume alone changes nothing"
