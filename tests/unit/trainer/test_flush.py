"""Each checkpoint is on disk before its name is: the order of flushes and renames, as the system sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.config import SaverConfig
from megarl.observe.run_folder import RunFolder
from megarl.preflight.invariance import batch
from megarl.trainer.checkpoints.saver import Saver
from megarl.trainer.replay.kept_batches import BatchRing
from megarl.trainer.run import Run

Events = list[tuple[str, Path]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Flushes and renames from now on, each with its path; a rename with the old one."""
    seen: Events = []
    fsync = os.fsync

    def record_fsync(handle: int) -> None:
        seen.append(("flushed", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def recorded(rename: Any) -> Any:
        def record_rename(path: Path, to: Path) -> Any:
            seen.append(("renamed", path))
            return rename(path, to)

        return record_rename

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", recorded(Path.rename))
    monkeypatch.setattr(Path, "replace", recorded(Path.replace))
    return seen


def test_files_then_manifest_then_folders_are_flushed_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, events: Events
) -> None:
    Saver(SaverConfig(asynchronous=False), tmp_path, lambda line: None).save({}, 3, {"mean": torch.ones(2)})
    writing, final = tmp_path / "step_000003.writing", tmp_path / "step_000003"
    files = {str(path.relative_to(final)) for path in final.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "trainer.json", "trainer.safetensors", "generators/rank_00000.json"}
    (renamed,) = [i for i, event in enumerate(events) if event == ("renamed", writing)]
    at = {path: i for i, (kind, path) in enumerate(events) if kind == "flushed"}
    data = [at[writing / name] for name in files - {"manifest.json"}]
    folders = [at[writing], at[writing / "generators"]]
    assert max(data) < at[writing / "manifest.json"] < min(folders)
    assert max(folders) < renamed < at[tmp_path]


def test_lines_that_a_resume_counts_on_are_flushed_before_the_checkpoints_name(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node's power loss leaves a checkpoint of step 3 beside metrics that end at step 1."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    folder = RunFolder(tmp_path)
    config = cli.load(["+experiment=gsm8k_grpo", "saver.asynchronous=false"])
    saver = Run(config, folder, {}, {}, 0.0)._saver
    for path in (folder.metrics, folder.episodes):  # a run without samples has no such file
        path.write_text("{}\n")
    saver.save({}, 3, {})
    renamed = events.index(("renamed", folder.checkpoints / "step_000003.writing"))
    flushed = {path for kind, path in events[:renamed] if kind == "flushed"}
    assert {folder.metrics, folder.episodes, tmp_path} <= flushed


def test_a_kept_batch_is_flushed_before_its_name(tmp_path: Path, events: Events) -> None:
    ring = BatchRing(cli.load(["+experiment=gsm8k_grpo", "saver.keep_batches=3"]), tmp_path, print)
    ring.keep(7, batch())
    writing = tmp_path / "step_000007.safetensors.writing"
    assert [event for event in events if event[1] in (writing, tmp_path)] == [
        ("flushed", writing),
        ("renamed", writing),
        ("flushed", tmp_path),
    ]
