"""Vocabulary (TP) and batch (DP) split over a real process group give the unsplit results."""

from __future__ import annotations

from pathlib import Path

import torch.multiprocessing as mp
from group_worker import run


def test_two_ranks_together_equal_one(tmp_path: Path) -> None:
    mp.spawn(run, args=(2, str(tmp_path / "rendezvous")), nprocs=2)
