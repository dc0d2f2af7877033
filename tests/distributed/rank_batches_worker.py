"""Worker of every rank: passes its own sequences, or the global batch, and writes log-probs and a step's results.

Arguments: the work folder, and the layout's knobs as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import algorithm_of
from megarl.algorithms.grpo import GRPOConfig
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, loss_fn, loss_weight_fn

SPREADS = {"shared": [range(8), range(8)], "own": [range(3), range(3, 8)], "alike": [range(4), range(4, 8)]}


def padded(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Pads a batch to `{key: [batch, length]}`, as a user's data loader does."""
    data = {k: pad_sequence(batch.split(v), batch_first=True) for k, v in batch.tokens.items()}
    mask = torch.arange(data["input_ids"].shape[1]) < batch.lengths[:, None]
    return {**data, "attention_mask": mask}


def measure(folder: Path, parallel: ParallelConfig, spread: str, out: Path) -> None:
    """Computes with the rank's own sequences of the batch, packed for log-probs and padded for the step."""
    stored = load_file(folder / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    config = EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=OptimizerConfig(**ADAM))
    engine = MegatronEngine(config, parallel)
    engine.initialize()
    own = batch.select(SPREADS[spread][engine.data_parallel_rank])
    result: dict[str, Any] = {"logprobs": engine.eval().logprobs(own)}
    result["best"] = engine.forward(own, lambda logits, _: logits.argmax(-1))
    stats = engine.train().train_batch(padded(own), loss_fn, loss_weight_fn, loss_input="logprobs")
    for name, tensor in engine.named_weights():
        if engine.groups.rank == 0:
            result[f"after.{name}"] = tensor.clone()
    result["prox_logp"] = found_in_update(folder, parallel, own)
    rank = engine.groups.rank
    save_file(result, out / f"{spread}_{rank}.safetensors")
    (out / f"{spread}_{rank}.json").write_text(json.dumps(stats))
    wrong = batch.select([rank])  # different on the ranks of one data parallel rank
    try:
        engine.logprobs(wrong)
        message = ""
    except UserError as error:
        message = str(error)
    (out / f"refused_{rank}.txt").write_text(message)


def found_in_update(folder: Path, parallel: ParallelConfig, own: PackedBatch) -> torch.Tensor:
    """Log-probs that an update sets on the rank's own batch, which has none."""
    optimizer = OptimizerConfig(**ADAM)
    config = EngineConfig(path=str(folder / "model"), max_tokens_per_mb=60, optimizer=optimizer)
    actor = MegatronPPOActor(config, algorithm_of(GRPOConfig(n_minibatches=1)), parallel)
    actor.initialize()
    batch = PackedBatch(own.cu_seqlens, {**own.tokens, "loss_mask": own["loss_mask"].bool()})
    actor.ppo_update(batch)
    return batch["prox_logp"]


def main(folder: Path, knobs: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    parallel = ParallelConfig(**knobs)
    for spread in SPREADS:
        measure(folder, parallel, spread, folder)
    groups.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
