"""Worker of every rank: trains each model with and without its layers of multi-token prediction, under each layout.

Arguments: the work folder, layouts as JSON {"name": {parallel knobs}}, and their models as JSON {"name": [model]}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from safetensors.torch import load_file
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model import heads
from megarl.actor.supervised import MegatronLMEngine, trained_tokens
from megarl.ops import linear_logprob
from megarl.ops.known_gradients import logprobs_of_token_loss
from megarl.ops.linear_logprob import linear_logprobs
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch

CLIP = 0.5  # below both gradient norms
FACTOR = 0.7
STEPS = 2
ADAM = {"lr": 0.3, "adam_eps": 1.0, "clip_grad": CLIP}  # see layout_worker.py


def train(
    folder: Path, parallel: ParallelConfig, out: Path, mtp: str, fields: dict[str, Any]
) -> list[dict[str, float]]:
    """Takes `STEPS` steps, writes the weights after each, and with mtp=train repeats the last one from a state.

    With logits in chunks, also repeats the first one with logits computed twice, and compares all bits.
    """
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)

    def engine_of() -> MegatronLMEngine:
        config = EngineConfig(
            path=str(folder / "model"),
            max_tokens_per_mb=60,
            optimizer=OptimizerConfig(**ADAM),
            mtp=mtp,
            mtp_loss_scaling_factor=FACTOR,
            **fields,
        )
        engine = MegatronLMEngine(config, parallel)
        engine.initialize()
        return engine

    engine, stats = engine_of(), []
    for step in range(STEPS):
        if step == STEPS - 1:
            engine.snapshot_state().write(out / f"state_{mtp}")
            torch.distributed.barrier()
        stats.append(engine.train_lm(batch))
        engine.save(out / f"{mtp}_{step + 1}")
    stats.append(engine.evaluate_lm(batch))
    if mtp == "train":
        check_megatrons_roll(engine, batch)
        if "kept_logits_mb" in fields:
            check_logits_once(engine_of, batch)
        resumed = engine_of()
        resumed.load_state(out / f"state_{mtp}")
        stats.append(resumed.train_lm(batch))
        resumed.save(out / "resumed")
    return stats


def products(patch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products of hidden states and heads in chunks, as they are computed."""
    rows: list[int] = []
    plain = linear_logprob.product

    def counted(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        rows.append(out.shape[0])
        return plain(x, weight, out)

    patch.setattr(linear_logprob, "product", counted)
    patch.setattr(linear_logprob, "cpu_chunk_rows", lambda total: 7)
    return rows


def logits_twice(*inputs: Tensor, with_entropy: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Takes the place of `logprobs_of_token_loss`. Layers of multi-token prediction, which have no entropies, compute
    logits again in backward."""
    if with_entropy:
        return logprobs_of_token_loss(*inputs, with_entropy=True, **options)
    return linear_logprobs(*inputs[:3], with_entropy=False, **options)


def bits_of(engine: MegatronEngine) -> list[Tensor]:
    """Copies of a rank's parameters and of their gradients."""
    parameters = [p for module in engine.modules for p in module.parameters()]
    return [p.detach().clone() for p in parameters] + [p.main_grad.clone() for p in parameters if p.requires_grad]


def check_logits_once(engine_of: Callable[[], MegatronLMEngine], batch: PackedBatch) -> None:
    """Compares statistics, gradients and weights of a step with those of one whose MTP head computes logits twice."""
    results, counts = [], []
    for once in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            counted, engine = products(patch), engine_of()
            if not once:
                patch.setattr(heads, "logprobs_of_token_loss", logits_twice)
            results.append((engine.train_lm(batch), bits_of(engine)))
            counts.append(sum(counted))
    (twice, before), (once_stats, after) = results
    assert twice == once_stats
    assert all(torch.equal(*both) for both in zip(before, after, strict=True))
    assert (counts[0] > counts[1]) == engine.groups.is_last_stage


def check_megatrons_roll(engine: MegatronLMEngine, batch: PackedBatch) -> None:
    """Compares this rank's tokens of the future with those of Megatron's roll, by padded bounds."""
    for mb in engine._microbatches(batch, trained_tokens):
        bounds = engine._cut.padded_cu_seqlens(mb.batch.cu_seqlens.cpu())
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        rolled = mb.input_ids[None]
        for future in mb.future:
            rolled, _ = roll_tensor(rolled, cp_group=engine.groups.cp, packed_seq_params=packed)
            assert torch.equal(rolled[0], future.ids)


def main(work: Path, layouts: dict[str, dict[str, Any]], models: dict[str, list[str]]) -> None:
    """Creates each layout in the same processes, and runs its models."""
    torch.set_num_threads(1)
    for name, knobs in layouts.items():
        fields = {field: knobs.pop(field) for field in ("recompute", "kept_logits_mb") if field in knobs}
        for model in models[name]:
            out = work / model / name
            out.mkdir(exist_ok=True)
            parallel = ParallelConfig(**knobs)
            stats = {mtp: train(work / model, parallel, out, mtp, fields) for mtp in ("carry", "train")}
            if torch.distributed.get_rank() == 0:
                (out / "stats.json").write_text(json.dumps(stats))
        groups.leave_layout()
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
