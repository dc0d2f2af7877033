"""Runs on every rank: takes real training steps and writes by how much this process has grown at their peak."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

SEQUENCES, LENGTH, PER_MICROBATCH = 6, 128, 3
STEPS = 2  # Adam's moments exist from the second on
# glibc keeps what was freed; with these every tensor goes back to the system, so that what is resident is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class Peak:
    """The largest resident size of this process while open, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self._process, self._open = psutil.Process(), True
        gc.collect()
        self.before = self.most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while self._open:
            self.most = max(self.most, self._process.memory_info().rss)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.before


def batch(vocab_size: int, sequences: int, length: int) -> PackedBatch:
    total = sequences * length
    ids = torch.randint(0, vocab_size, (total,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(total, dtype=torch.bool)
    return PackedBatch(cu_seqlens_of(torch.full((sequences,), length)), {"input_ids": ids, "loss_mask": mask})


def growth(config: EngineConfig, parallel: ParallelConfig, sequences: int, length: int) -> tuple[int, int]:
    """Bytes at the peak of loading and training over what this process held before, and its parameters."""
    with Peak() as peak:
        engine = MegatronLMEngine(config, parallel)
        engine.initialize()
        for _ in range(STEPS):
            engine.train_lm(batch(engine.hf_config.vocab_size, sequences, length))
    return peak.growth, sum(p.numel() for module in engine.modules for p in module.parameters())


def measure(big: str, tiny: str, parallel: ParallelConfig, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By case, the growth of this process and its parameters."""
    groups.initialize(parallel)
    growth(EngineConfig(path=tiny, init="random"), parallel, 2, 8)  # code that is loaded at its first use
    found = {}
    for name, fields in cases.items():
        config = EngineConfig(
            path=big,
            init="random",
            max_tokens_per_mb=PER_MICROBATCH * LENGTH,
            optimizer=OptimizerConfig(lr=1e-4),
            **fields,
        )
        found[name] = growth(config, parallel, SEQUENCES, LENGTH)
    groups.leave_layout()
    return found


def main(big: str, tiny: str, out: Path, layouts: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    found = {name: measure(big, tiny, ParallelConfig(**sizes), cases) for name, (sizes, cases) in layouts.items()}
    (out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]), json.loads(sys.argv[4]))
