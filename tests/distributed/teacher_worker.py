"""Worker of every rank: loss and gradients of a student beside its teacher, under each layout.

Arguments: the work folder, and the layouts as JSON {"name": {parallel knobs}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.distillation import TOP_IDS, TOP_LOGPROBS, Distillation, MegatronTeacher, top_k_of
from megarl.actor.engine import MegatronEngine
from megarl.algorithms.opd import OPD, OPDConfig
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import gather_gradients

K = 5
MODES: dict[str, tuple[str, float]] = {
    "forward": ("full", 0.0),
    "jsd": ("full", 0.4),
    "reverse": ("full", 1.0),
    "top_k": ("top_k", 0.4),
}


def measure(folder: Path, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """Losses, log-probs of the teacher and gradients by mode, under HF names."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    optimizer = OptimizerConfig(lr=1e-30, clip_grad=0.0)
    config = EngineConfig(path=str(folder / "student"), max_tokens_per_mb=70, temperature=0.8, optimizer=optimizer)
    student = MegatronEngine(config, parallel)
    student.initialize()
    teacher = MegatronTeacher(
        EngineConfig(path=str(folder / "teacher"), max_tokens_per_mb=70, temperature=0.8), parallel
    )
    teacher.initialize()
    ids, logprobs = top_k_of(teacher, batch, K, student.hf_config.vocab_size)
    figures = {"teacher_logp": teacher.compute_logp(batch), "top_ids": ids.float(), "top_logprobs": logprobs}
    batch.set_tokens(TOP_IDS, ids)
    batch.set_tokens(TOP_LOGPROBS, logprobs)
    for name, (divergence, beta) in MODES.items():
        algorithm = OPD(OPDConfig(divergence=divergence, beta=beta, data_coef=0.3))
        source = Distillation(student, beta, teacher if divergence == "full" else None)
        stats = student.train().train_batch(batch, algorithm.data_loss, algorithm.loss_weight, source)
        figures |= {f"{name} {key}": torch.tensor(stats[key]) for key in ("loss", "teacher_divergence", "entropy")}
        figures |= {f"{name}/{key}": value for key, value in gather_gradients(student).items()}
    return figures


def main(work: Path, layouts: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for name, knobs in layouts.items():
        figures = measure(work, ParallelConfig(**knobs))
        if dist.get_rank() == 0:
            save_file({key: value.contiguous() for key, value in figures.items()}, work / f"{name}.safetensors")
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
