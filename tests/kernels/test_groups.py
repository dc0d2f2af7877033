"""Split over a real process group equals unsplit: vocabulary (TP), batch (DP)."""

from __future__ import annotations

from pathlib import Path

import torch.multiprocessing as mp
from group_worker import run


def test_two_ranks_together_equal_one(tmp_path: Path) -> None:
    mp.spawn(run, args=(2, str(tmp_path / "rendezvous")), nprocs=2)
