"""A safetensors file that is whole before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from safetensors.torch import save_file
from torch import Tensor

PYTORCH = MappingProxyType({"format": "pt"})  # transformers reads no file without it


def save(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] = PYTORCH) -> None:
    """Writes tensors, readable by all users, and waits until they are stored.

    `save_file` sets the length first. A file system in a network may tell only at the flush that the disk is full: the
    rest would be zeros.

    Raises:
        OSError: the file cannot be written or stored.
    """
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(0o644)  # save_file makes it readable by its owner only
    with path.open("rb") as file:
        os.fsync(file.fileno())
