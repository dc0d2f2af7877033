"""Each checkpoint is on disk before its name is: the order of flushes and renames, as the system sees them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import SaverConfig
from megarl.trainer.checkpoints.saver import Saver


def test_files_then_manifest_then_folders_are_flushed_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(handle: int) -> None:
        events.append(("flushed", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def record_rename(path: Path, to: Path) -> Any:
        events.append(("renamed", path))
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
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
