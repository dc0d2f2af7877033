"""Weights by files: HF safetensors in a folder that trainer and servers both see. The slowest way, and the plainest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def write(folder: Path, index: int, tensors: Mapping[str, Tensor]) -> Path:
    """Writes checkpoint tensors to file `index` of the folder, so that it is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"model-{index:05d}.safetensors"
    beside = path.with_suffix(".partial")
    save_file(dict(tensors), beside, metadata={"format": "pt"})
    os.replace(beside, path)
    return path


def read(path: str) -> list[tuple[str, Tensor]]:
    """The tensors of a file, by name."""
    return list(load_file(path).items())


def remove(folder: Path) -> None:
    """Removes what `write` wrote; other files of the folder stay."""
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
