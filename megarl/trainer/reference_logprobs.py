"""The start policy's log-probs of a preference data set: computed once before training, or online for each batch.

Training changes nothing that they depend on, so one pass is enough. Its file lies beside the prepared data, under a
hash of rows, weights and knobs, and the frozen model is freed. `online` keeps the model and needs no pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import track
from safetensors.torch import load_file
from torch import Tensor

from megarl.actor.config import EngineConfig
from megarl.actor.weights import saved_file
from megarl.data.arithmetic import cache_folder
from megarl.data.mixture import Mixture
from megarl.data.prepare import content_hash
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.parallel.broadcast import gather_json, is_rank0
from megarl.types import PackedBatch

ROWS_AT_ONCE = 256

Logprobs = Callable[[PackedBatch], Tensor]  # token-aligned, 0 outside `loss_mask`


class Frozen(Protocol):
    """The start policy."""

    def compute_logp(self, data: Any) -> Tensor:
        """float32 `[total_tokens]`: log-probs of the tokens that `loss_mask` marks, 0 elsewhere."""

    def offload(self) -> None:
        """Moves the weights to the host."""


def online(reference: Frozen) -> Logprobs:
    """Computes log-probs batch by batch. Between batches the weights stay on the host."""

    def logprobs(batch: PackedBatch) -> Tensor:
        values = reference.compute_logp(batch)
        reference.offload()
        return values

    return logprobs


def stored(
    config: EngineConfig,
    rows: Any,
    pack: Callable[[Sequence[Any]], PackedBatch],
    build: Callable[[], Frozen],
) -> Logprobs:
    """Looks up the log-probs of `rows` in a file, which the first run writes. A collective.

    Args:
        rows: a data set of preferences; every row has a `row_id`, and all pack into the same number of sequences.
        pack: makes a batch of rows.
        build: makes the start policy; called only if there is no file.
    """
    parts = rows.parts if isinstance(rows, Mixture) else [rows]
    path = cache_folder("prepared") / f"{_identity(config, parts)}.reference.safetensors"
    if all(gather_json(path.is_file())):
        return _Stored(load_file(path))
    tensors = _compute(build(), parts, pack)  # a collective: all ranks or none
    if is_rank0():
        _write(path, tensors)
    gather_json(None)  # the others look once rank 0 has written
    if not path.is_file():  # another machine's folder
        _write(path, tensors)
    return _Stored(tensors)


def _compute(
    reference: Frozen, parts: Sequence[Any], pack: Callable[[Sequence[Any]], PackedBatch]
) -> dict[str, Tensor]:
    """`row_ids` and `lengths` (trained tokens) `[sequences]`, and the log-probs of these tokens, end to end."""
    columns: dict[str, list[Tensor]] = {"row_ids": [], "lengths": [], "logprobs": []}
    chunks = [(part, start) for part in parts for start in range(0, len(part), ROWS_AT_ONCE)]
    for part, start in track(chunks, "reference log-probs", disable=not is_rank0()):
        batch = pack([part[i] for i in range(start, min(start + ROWS_AT_ONCE, len(part)))])
        mask = batch["loss_mask"]
        columns["row_ids"].append(batch["row_ids"])
        columns["lengths"].append(torch.stack([flags.sum() for flags in mask.split(batch.lengths.tolist())]))
        columns["logprobs"].append(reference.compute_logp(batch)[mask])
    reference.offload()
    return {name: torch.cat(values) for name, values in columns.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes under another name, then renames: no run reads half a file."""
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        saved_file.save(tensors, temporary)
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"reference log-probs cannot be written to {path.parent} ({error.strerror or error}); set XDG_CACHE_HOME "
            "to a folder that you may write, or reference.mode=online"
        ) from error


class _Stored:
    """Looks up log-probs by row. A row's sequences always come in the same order."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._rows: dict[int, list[Tensor]] = {}
        parts = tensors["logprobs"].split(tensors["lengths"].tolist())
        for row, part in zip(tensors["row_ids"].tolist(), parts, strict=True):
            self._rows.setdefault(row, []).append(part)

    def __call__(self, batch: PackedBatch) -> Tensor:
        seen: dict[int, int] = {}
        parts = []
        for row in batch["row_ids"].tolist():
            sequences = self._rows[row]
            parts.append(sequences[seen.get(row, 0) % len(sequences)])  # a mixture may repeat a row in a batch
            seen[row] = seen.get(row, 0) + 1
        out = torch.zeros(batch.total_tokens)
        out[batch["loss_mask"]] = torch.cat(parts)
        return out


def _identity(config: EngineConfig, parts: Sequence[Any]) -> str:
    """Hash of the rows, the weights' files and the knobs that the log-probs depend on."""
    folder = local_folder(config.path)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    model = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    base = config.lora.quantization if config.lora.rank else "none"
    knobs = [config.init, config.init_seed, config.dtype, config.temperature, base, config.float32_head, config.fp8]
    text = json.dumps([model, knobs, [content_hash(part) for part in parts]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
