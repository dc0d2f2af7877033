"""Worker of every rank: takes real training steps and writes the peak growth of this process in bytes."""

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

from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.supervised import MegatronLMEngine
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

SEQUENCES, LENGTH, PER_MICROBATCH = 6, 128, 3
STEPS = 2  # Adam's moments exist from the second step on
# glibc keeps freed memory. With these settings every freed tensor returns to the system, so resident memory is in use.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class Peak:
    """Measures the largest resident size of this process while open, every millisecond."""

    def __init__(self) -> None:
        self.before = self.peak = 0  # bytes
        self._process, self._open = psutil.Process(), True
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.peak = self._process.memory_info().rss
        self._thread.start()
        return self

    def _sample(self) -> None:
        while self._open:
            self.peak = max(self.peak, self._process.memory_info().rss)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.peak - self.before


def batch(vocab_size: int, sequences: int, length: int) -> PackedBatch:
    total = sequences * length
    ids = torch.randint(0, vocab_size, (total,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(total, dtype=torch.bool)
    return PackedBatch(cu_seqlens_of(torch.full((sequences,), length)), {"input_ids": ids, "loss_mask": mask})


def growth(
    config: EngineConfig, parallel: ParallelConfig, sequences: int, length: int, engines: int = 1
) -> tuple[int, int]:
    """Peak growth in bytes of this process while it loads and trains, and the bytes of an engine's parameters.

    Further `engines` are on the first one's base.
    """
    with Peak() as peak:
        trained: list[MegatronLMEngine] = []
        for _ in range(engines):
            engine = MegatronLMEngine(config, parallel)
            engine.initialize(base=trained[0] if trained else None)
            trained.append(engine)
        for engine in STEPS * trained:
            engine.train_lm(batch(engine.hf_config.vocab_size, sequences, length))
    return peak.growth, sum(p.nbytes for module in engine.modules for p in module.parameters())


def engine_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A case's knobs of the engine, with those of adapters in their class. `engines` is no knob."""
    knobs = {name: value for name, value in fields.items() if name != "engines"}
    return {name: LoraConfig(**value) if name == "lora" else value for name, value in knobs.items()}


def measure(big: str, tiny: str, parallel: ParallelConfig, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Measures `growth` of every case."""
    groups.initialize(parallel)
    growth(EngineConfig(path=tiny, init="random"), parallel, 2, 8)  # loads code that is loaded at first use
    measured = {}
    for name, fields in cases.items():
        config = EngineConfig(
            path=big,
            init="random",
            max_tokens_per_mb=PER_MICROBATCH * LENGTH,
            optimizer=OptimizerConfig(lr=1e-4),
            **engine_fields(fields),
        )
        measured[name] = growth(config, parallel, SEQUENCES, LENGTH, fields.get("engines", 1))
    groups.leave_layout()
    return measured


def main(big: str, tiny: str, out: Path, layouts: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    measured = {name: measure(big, tiny, ParallelConfig(**sizes), cases) for name, (sizes, cases) in layouts.items()}
    (out / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]), json.loads(sys.argv[4]))
