"""Keeps the last batches of a run on disk, as the trainer received them. `megarl.replay` takes their steps again.

batches/step_000012.safetensors
    tensors     `tokens/KEY` [tokens, ...], `sequences/KEY` [sequences, ...] and `cu_seqlens`, of all ranks together
    metadata    {"format", "step", "algorithm", "config"} as JSON, and the SHA-256 of both
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.actor.weights import saved_file
from megarl.algorithms import AlgorithmConfig, name_of
from megarl.config import Config
from megarl.knobs import UserError
from megarl.trainer.checkpoints.manifest import WRITING, Damaged, flush
from megarl.types import PackedBatch

FORMAT = 1
SUFFIX = ".safetensors"
TOKENS, SEQUENCES, BOUNDS = "tokens/", "sequences/", "cu_seqlens"


class KeepError(RuntimeError):
    """A batch could not be written. The message names the file and the cause."""


@dataclass(frozen=True)
class Facts:
    """Step of a kept batch, and the run that took it: its algorithm's name and its configuration."""

    step: int
    algorithm: str
    config: dict[str, Any]


class BatchRing:
    """The last batches of a run in a folder: at most `saver.keep_batches` of them, and `saver.batches_gb` together."""

    def __init__(self, config: Config, folder: Path, note: Callable[[str], None]) -> None:
        """`note` prints a line."""
        self.folder = folder
        self._most, self._most_bytes = config.saver.keep_batches, int(config.saver.batches_gb * 1e9)
        self._config = config
        self._note = note

    @property
    def enabled(self) -> bool:
        return self._most > 0

    def forget_after(self, step: int) -> None:
        """Removes the batches of later steps, which a resumed run samples anew, and leftovers of killed runs."""
        for leftover in self.folder.glob(f"*{WRITING}"):
            leftover.unlink()
        for later, path in kept_steps(self.folder).items():
            if later > step:
                path.unlink()

    def keep(self, step: int, batch: PackedBatch) -> None:
        """Writes the batch of `step`, in place of the oldest ones.

        Raises:
            KeepError: it cannot be written.
        """
        tensors = _tensors(batch)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self._most_bytes:
            limit = f"saver.batches_gb={self._most_bytes / 1e9:g}"
            self._note(f"the batch of step {step} has {size / 1e9:.3g} GB, more than {limit}, and is not kept")
            return
        path = self.folder / f"step_{step:06d}{SUFFIX}"
        writing = path.with_name(path.name + WRITING)
        try:
            self.folder.mkdir(exist_ok=True)
            self._make_room(size)
            saved_file.save(tensors, writing, _metadata(facts_of(self._config, step), tensors))
            writing.replace(path)
            flush(self.folder)
        except (OSError, SafetensorError) as error:
            writing.unlink(missing_ok=True)
            raise KeepError(f"the batch of step {step} could not be written to {path}: {error}") from error

    def _make_room(self, size: int) -> None:
        """Removes the oldest batches until one of `size` bytes may join the others."""
        paths = [path for _, path in sorted(kept_steps(self.folder).items())]
        sizes = [path.stat().st_size for path in paths]
        while paths and (len(paths) >= self._most or sum(sizes) + size > self._most_bytes):
            paths.pop(0).unlink()
            sizes.pop(0)


def facts_of(config: Config, step: int) -> Facts:
    """Facts of a batch that a run keeps. Leaves out where the run lies and whether it was resumed."""
    algorithm: AlgorithmConfig = config.algorithm
    values: Any = OmegaConf.to_container(OmegaConf.structured(replace(config, resume=None, run_root="runs")))
    return Facts(step, name_of(algorithm), values)


def kept_steps(folder: Path) -> dict[int, Path]:
    """Files of the kept batches by step, whole or damaged."""
    steps = {path.stem.removeprefix("step_"): path for path in folder.glob(f"step_*{SUFFIX}")}
    return {int(step): path for step, path in sorted(steps.items()) if step.isdecimal()}


def read_facts(path: Path) -> Facts:
    """Reads what a kept batch is of, and none of its tensors.

    Raises:
        Damaged: the file cannot be read, or lacks its facts.
        UserError: a newer format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return _facts(path, file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from error


def read_batch(path: Path) -> PackedBatch:
    """Reads a kept batch, on the host.

    Raises:
        Damaged: it is not what was written.
        UserError: a newer format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path.name} cannot be read ({error})") from error
    _facts(path, metadata)
    if _digest(metadata["facts"], tensors) != metadata.get("sha256"):
        raise Damaged(f"{path.name} is not what was written: its SHA-256 differs")

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    batch = PackedBatch(tensors[BOUNDS], below(TOKENS), below(SEQUENCES))
    batch.shared = True  # every rank reads the same file
    return batch


def _tensors(batch: PackedBatch) -> dict[str, Tensor]:
    named = {
        BOUNDS: batch.cu_seqlens,
        **{TOKENS + key: value for key, value in batch.tokens.items()},
        **{SEQUENCES + key: value for key, value in batch.sequences.items()},
    }
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named.items()}


def _metadata(facts: Facts, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    text = json.dumps({"format": FORMAT, "step": facts.step, "algorithm": facts.algorithm, "config": facts.config})
    return {"facts": text, "sha256": _digest(text, tensors)}


def _facts(path: Path, metadata: Mapping[str, str]) -> Facts:
    try:
        facts = json.loads(metadata["facts"])
        if facts["format"] > FORMAT:
            raise UserError(
                f"{path} has format {facts['format']}, this megarl reads up to {FORMAT}; replay it with a newer megarl"
            )
        return Facts(facts["step"], facts["algorithm"], facts["config"])
    except (KeyError, ValueError, TypeError) as error:
        raise Damaged(f"{path.name} has no facts of a kept batch") from error


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
