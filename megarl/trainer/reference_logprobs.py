"""The start policy's log-probs of a data set of preferences: taken once before training and kept, or when needed.

They depend on nothing that training changes, so one pass is enough; it is kept by its content under `prepared` beside
the prepared data, and the frozen model is let go again. `online` keeps the model and spares the pass.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.actor.config import EngineConfig
from megarl.data.arithmetic import cache_folder
from megarl.families import local_folder
from megarl.knobs import UserError, knob
from megarl.parallel.broadcast import gather_json
from megarl.types import PackedBatch

MODES = ("precompute", "online")
ROWS_AT_ONCE = 256

Logprobs = Callable[[PackedBatch], Tensor]  # token-aligned, 0 outside `loss_mask`


@dataclass(frozen=True)
class ReferenceConfig:
    """Where the offline methods take the start policy's log-probs from."""

    mode: str = knob(
        "precompute", "precompute: once, before the first step, kept for later runs; online: a frozen model beside"
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"reference.mode={self.mode} must be one of {', '.join(MODES)}")


class Frozen(Protocol):
    """What is asked of the start policy, a `MegatronReference`."""

    def compute_logp(self, data: Any) -> Tensor:
        """float32 `[total_tokens]`: log-probs of the tokens that `loss_mask` marks, 0 elsewhere."""

    def offload(self) -> None:
        """Lets the weights wait on the host."""


def online(reference: Frozen) -> Logprobs:
    """The log-probs of each batch as it comes; in between the weights wait on the host."""

    def logprobs(batch: PackedBatch) -> Tensor:
        found = reference.compute_logp(batch)
        reference.offload()
        return found

    return logprobs


def stored(
    config: EngineConfig,
    rows: Any,
    pack: Callable[[Sequence[Any]], PackedBatch],
    build: Callable[[], Frozen],
) -> Logprobs:
    """Those of all `rows`, from a file where an earlier run left them. A collective.

    Args:
        rows: a data set of preferences; every row has a `row_id` and packs into as many sequences as any other.
        pack: its rows as a batch.
        build: gives the start policy; called only where there is no file.
    """
    from megarl.data.prepare import Mixture  # with `datasets`; the configuration imports this module and must be quick

    parts = rows.parts if isinstance(rows, Mixture) else [rows]
    path = cache_folder("prepared") / f"{_identity(config, parts)}.reference.safetensors"
    if not all(gather_json(path.is_file())):  # a rank alone could not compute: it is a collective
        _write(path, _compute(build(), parts, pack))
    return _Stored(load_file(path))


def _compute(
    reference: Frozen, parts: Sequence[Any], pack: Callable[[Sequence[Any]], PackedBatch]
) -> dict[str, Tensor]:
    """`row_ids` and `lengths` (trained tokens) `[sequences]`, and the log-probs of these tokens, end to end."""
    found: dict[str, list[Tensor]] = {"row_ids": [], "lengths": [], "logprobs": []}
    chunks = [(part, start) for part in parts for start in range(0, len(part), ROWS_AT_ONCE)]
    quiet = dist.is_initialized() and dist.get_rank() != 0
    for part, start in track(chunks, "reference log-probs", disable=quiet):
        batch = pack([part[i] for i in range(start, min(start + ROWS_AT_ONCE, len(part)))])
        mask = batch["loss_mask"]
        found["row_ids"].append(batch["row_ids"])
        found["lengths"].append(torch.stack([flags.sum() for flags in mask.split(batch.lengths.tolist())]))
        found["logprobs"].append(reference.compute_logp(batch)[mask])
    reference.offload()
    return {name: torch.cat(values) for name, values in found.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """In one step, so that no run ever reads half a file."""
    beside = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, beside)
        beside.replace(path)
    except OSError as error:
        raise UserError(
            f"reference log-probs cannot be written to {path.parent} ({error.strerror or error}); set XDG_CACHE_HOME "
            "to a folder that you may write, or reference.mode=online"
        ) from error


class _Stored:
    """Looks log-probs up by row; a row's sequences come in one order always."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._rows: dict[int, list[Tensor]] = {}
        parts = tensors["logprobs"].split(tensors["lengths"].tolist())
        for row, part in zip(tensors["row_ids"].tolist(), parts, strict=True):
            self._rows.setdefault(row, []).append(part)

    def __call__(self, batch: PackedBatch) -> Tensor:
        seen: dict[int, int] = {}
        parts = []
        for row in batch["row_ids"].tolist():
            known = self._rows[row]
            parts.append(known[seen.get(row, 0) % len(known)])  # a batch may hold a row twice, in a mixture
            seen[row] = seen.get(row, 0) + 1
        out = torch.zeros(batch.total_tokens)
        out[batch["loss_mask"]] = torch.cat(parts)
        return out


def _identity(config: EngineConfig, parts: Sequence[Any]) -> str:
    """A hash of all that the log-probs come from: the rows, the weights' files, how the model is run."""
    from megarl.data.prepare import content_hash

    folder = local_folder(config.path)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")])
    model = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    knobs = [config.init, config.init_seed, config.dtype, config.temperature]
    text = json.dumps([model, knobs, [content_hash(part) for part in parts]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
