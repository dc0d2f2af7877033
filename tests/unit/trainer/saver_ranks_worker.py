"""Worker of test_saver_ranks.py: two ranks save and restore a run without engines, and write what each saw."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.config import SaverConfig
from megarl.trainer.checkpoints import saver as saver_module
from megarl.trainer.checkpoints.saver import CheckpointError, Saver


def damaged(folder: Path, name: str) -> None:
    """Changes the last byte of a file; its size stays."""
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def main(work: Path) -> None:
    rank = int(os.environ["RANK"])
    store = f"file://{work}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=300), int(os.environ["WORLD_SIZE"]), rank)
    seen: dict[str, Any] = {"restored": {}}
    (work / "whole").mkdir(exist_ok=True)
    saver = Saver(SaverConfig(asynchronous=False), work / "whole", lambda line: None)
    for step in (1, 2):
        saver.save({}, step, {"step_saved": step})
    files = sorted(str(p.relative_to(work / "whole")) for p in (work / "whole").glob("step_000002/**/*.json"))
    for number, name in enumerate(files):
        copy = work / f"copy_{number}"
        if rank == 0:
            shutil.copytree(work / "whole", copy)
            damaged(copy, name)
        dist.barrier()
        restored = Saver(SaverConfig(), copy, lambda line: None).restore({})
        seen["restored"][name] = restored["step_saved"]
    if rank == 1:  # a disk that is full on one machine
        saver_module._generators = lambda folder, rank: folder / "missing" / "rank.json"
    try:
        saver.save({}, 3, {})
    except CheckpointError as error:
        seen["error"] = str(error)
    (work / f"seen_{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
