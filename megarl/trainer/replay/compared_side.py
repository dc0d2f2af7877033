"""The ranks of one side of a comparison: log-probs and layers of a batch under given weights, without training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl import cli
from megarl.actor.engine import MegatronEngine
from megarl.actor.layer_states import ROWS, layer_states
from megarl.trainer.replay.kept_batches import read_batch
from megarl.types import PackedBatch

LOGPROBS = "logprobs"


def first_sequences(path: Path, count: int) -> PackedBatch:
    """The first sequences of a kept batch, at most `count`."""
    batch = read_batch(path)
    part = batch.select(range(min(count, batch.num_seqs)))
    part.shared = True
    return part


def measure(file: Path) -> None:
    """Measures the side that the file describes: `overrides`, `weights`, `batch` and `sequences`. A collective.

    Every rank writes its part of the layers beside the file, rank 0 the log-probs too.
    """
    side = json.loads(file.read_text())
    config = cli.composed(side["overrides"])
    actor = replace(config.actor, path=side["weights"], init="checkpoint", shared_prefix=False)
    engine = MegatronEngine(actor, config.parallel, trainable=False, deterministic=config.determinism)
    engine.initialize()
    engine.eval()
    batch = first_sequences(Path(side["batch"]), side["sequences"])
    states = layer_states(engine, batch)
    if engine.groups.rank == 0:
        save_file({LOGPROBS: engine.logprobs(batch)}, file.with_name("logprobs.safetensors"))
    else:
        engine.logprobs(batch)
    if states:
        path = file.with_name(f"layers_{engine.groups.rank:05d}.safetensors")
        save_file({key: value.contiguous() for key, value in states.items()}, path)


def read_side(folder: Path, tokens: int) -> dict[str, Tensor]:
    """Log-probs `[tokens]` and layers `[tokens, n]` that the ranks wrote."""
    side = load_file(folder / "logprobs.safetensors")
    for path in sorted(folder.glob("layers_*.safetensors")):
        states = load_file(path)
        rows = states.pop(ROWS)
        for key, values in states.items():
            whole = side.setdefault(key, values.new_zeros(tokens, *values.shape[1:]))
            whole[rows] = values
    return side
