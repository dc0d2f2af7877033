"""The trainer's own state on disk: JSON, with its tensors in a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor

DOCUMENT, TENSORS = "trainer.json", "trainer.safetensors"
MARK = "$tensor"  # {MARK: key} stands for a tensor


class Resumable(Protocol):
    """A part of a run with state to resume from, such as the position in the data or the episodes in flight.

    A state is made of dicts with string keys, lists, numbers, strings, None and tensors. Rank 0's is kept, and handed
    to every rank that has the part.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def freeze(state: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Copies a state into text and tensors, which later steps do not change."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            key = str(len(tensors))
            tensors[key] = value.detach().cpu().clone().contiguous()
            return {MARK: key}
        if isinstance(value, Mapping):
            return {key: visit(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [visit(inner) for inner in value]
        return value

    return json.dumps(visit(state)), tensors


def write(folder: Path, text: str, tensors: dict[str, Tensor]) -> list[Path]:
    """Writes a frozen state and returns its files."""
    written = [folder / DOCUMENT]
    written[0].write_text(text)
    if tensors:
        written.append(folder / TENSORS)
        save_file(tensors, written[1])
        written[1].chmod(0o644)  # safetensors writes 0600
    return written


def read(folder: Path) -> dict[str, Any]:
    """Reads the state that `write` wrote to `folder`."""
    tensors = load_file(folder / TENSORS) if (folder / TENSORS).is_file() else {}

    def visit(value: Any) -> Any:
        if isinstance(value, dict):
            return tensors[value[MARK]] if set(value) == {MARK} else {k: visit(v) for k, v in value.items()}
        return [visit(inner) for inner in value] if isinstance(value, list) else value

    state: dict[str, Any] = visit(json.loads((folder / DOCUMENT).read_text()))
    return state
