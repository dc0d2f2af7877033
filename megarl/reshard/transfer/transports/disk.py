"""Weights as files: HF safetensors in a folder that trainer and servers both see. The slowest and simplest way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def write(folder: Path, index: int, tensors: Mapping[str, Tensor]) -> Path:
    """Writes checkpoint tensors to file `index` of the folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"model-{index:05d}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    os.replace(partial, path)
    return path


def read(path: str) -> list[tuple[str, Tensor]]:
    """The tensors of a file, by name."""
    return list(load_file(path).items())


def remove(folder: Path) -> None:
    """Removes the files of `write`; other files of the folder stay."""
    for path in folder.glob("model-*.safetensors"):
        path.unlink()
