"""Reads an engine's state from disk, box by box. Needs no Megatron and no process group, and unpickles nothing.

    engine.json                facts: format, model, dtype, layout of the writer, steps taken
    index.json                 boxes of each HF tensor, and the runs of each box by rank
    rank_00000.safetensors     a rank's runs: 1-D tensors named KIND:TENSOR@START
    hf/                        HF config and tokenizer

Coordinates refer to the HF checkpoint. A box `[start, stop)` is one model-parallel rank's part of a tensor. A run
`[first, last)` is one data-parallel rank's part of a box, counted in the box's elements in row-major order. Every run
is stored once per kind. Kinds are `weight`, the float32 `main` if weights are bfloat16, and Adam's `exp_avg` and
`exp_avg_sq` after the first step. Tensors that are not trained have the one kind `buffer`, float32.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megarl.families import adapters_of, is_scalar, trains_mtp
from megarl.knobs import UserError

FORMAT = 2
FACTS, INDEX, HF = "engine.json", "index.json", "hf"
WEIGHT, BUFFER = "weight", "buffer"  # kinds
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPE_FIELDS = (  # fields of a HF config that a stored state must match: tensor shapes and computation
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings", "rope_parameters", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip

Place = tuple[int, ...]


def rank_file(rank: int) -> str:
    """File name of a rank's runs."""
    return f"rank_{rank:05d}.safetensors"


def key_of(kind: str, name: str, start: Sequence[int]) -> str:
    """Name, in a rank's file, of its run of the box of `name` that begins at `start`."""
    return f"{kind}:{name}@{','.join(map(str, start))}"


@dataclass(frozen=True)
class StoredBox:
    """A stored box of a tensor, and its runs `(first, last, rank)` in order, with `last` exclusive."""

    start: Place
    stop: Place
    runs: tuple[tuple[int, int, int], ...]

    @property
    def shape(self) -> Place:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))


class StoredState:
    """The state in a folder. Opens files at the first read. A read holds at most one box's rows in memory."""

    def __init__(self, folder: Path) -> None:
        """Reads facts and index.

        Raises:
            UserError: the folder has no state, an unsupported format, or an incomplete index.
        """
        self.folder = folder
        self.facts = read_facts(folder)
        index = json.loads((folder / INDEX).read_text())
        self.shapes: dict[str, Place] = {name: tuple(entry["shape"]) for name, entry in index.items()}
        self.kinds: dict[str, str] = {name: entry.get("kind", WEIGHT) for name, entry in index.items()}
        self._boxes = {name: [_box(box) for box in entry["boxes"]] for name, entry in index.items()}
        self._files: dict[int, Any] = {}
        for name, boxes in self._boxes.items():
            self._check_complete(name, boxes)

    def _check_complete(self, name: str, boxes: list[StoredBox]) -> None:
        stored_elements = 0
        for box in boxes:
            ends = [0, *(stop for _, stop, _ in box.runs)]
            if [start for start, _, _ in box.runs] != ends[:-1] or ends[-1] != math.prod(box.shape):
                raise UserError(
                    f"{self.folder}: the runs of {name} leave a gap: its write did not finish; use another checkpoint"
                )
            stored_elements += ends[-1]
        if stored_elements != math.prod(self.shapes[name]):
            raise UserError(
                f"{self.folder} holds {stored_elements} elements of {name}, which has {math.prod(self.shapes[name])}: "
                "its write did not finish; use another checkpoint"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model. Some weights may be float32 all the same; the other kinds always are."""
        return DTYPES[self.facts["dtype"]]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(map(math.prod, self.shapes.values())) * self.dtype.itemsize

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every complete weight with its HF name, in the order of `hf_weights.gather`."""
        for name, shape in self.shapes.items():
            flat = self.read(self.kinds[name], name, (0,) * len(shape), shape)
            yield name, flat.reshape(shape)

    def read(self, kind: str, name: str, start: Place, stop: Place, run: tuple[int, int] | None = None) -> Tensor:
        """Reads a run (default: all) of the box `[start, stop)` of a tensor, 1-D, on the host.

        Reads only the rows of the box that the run overlaps.
        """
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        width = math.prod(shape[1:])
        first, last = run or (0, math.prod(shape))
        low, high = (first // width, -(-last // width)) if last > first else (0, 0)
        rows = torch.empty(high - low, *shape[1:], dtype=self.dtype if kind == WEIGHT else torch.float32)
        in_float32 = False  # a weight may be float32 in a bfloat16 model
        wanted = ((start[0] + low, *start[1:]), (start[0] + high, *stop[1:]))
        for box in self._boxes[name]:
            a = tuple(max(x, y) for x, y in zip(wanted[0], box.start, strict=True))
            b = tuple(min(x, y) for x, y in zip(wanted[1], box.stop, strict=True))
            if any(x >= y for x, y in zip(a, b, strict=True)):
                continue
            stored_rows = self._rows(kind, name, box, a[0] - box.start[0], b[0] - box.start[0])
            tail = tuple(slice(x - o, y - o) for x, y, o in zip(a[1:], b[1:], box.start[1:], strict=True))
            into = tuple(slice(x - o, y - o) for x, y, o in zip(a, b, wanted[0], strict=True))
            if stored_rows.dtype == torch.float32 and not in_float32:
                rows, in_float32 = rows.float(), True
            rows[into] = stored_rows[(slice(None), *tail)]
        return rows.flatten()[first - low * width : last - low * width]

    def _rows(self, kind: str, name: str, box: StoredBox, low: int, high: int) -> Tensor:
        """Reads rows `[low, high)` of a stored box, `[high - low, *box.shape[1:]]`."""
        width = math.prod(box.shape[1:])
        parts = []
        for start, stop, rank in box.runs:
            a, b = max(start, low * width), min(stop, high * width)
            if a < b:
                stored = self._file(rank).get_slice(key_of(kind, name, box.start))
                parts.append(stored[a - start : b - start])
        return torch.cat(parts).view(high - low, *box.shape[1:])

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(self.folder / rank_file(rank), framework="pt")
        return self._files[rank]


def _box(entry: dict[str, Any]) -> StoredBox:
    return StoredBox(tuple(entry["start"]), tuple(entry["stop"]), tuple((a, b, rank) for a, b, rank in entry["runs"]))


def read_facts(folder: Path) -> dict[str, Any]:
    """Reads the facts of a stored state: format, model, dtype, layout of the writer, steps taken.

    Raises:
        UserError: the folder has no state, or a newer format.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
        written_format = facts["format"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} holds no state of an engine ({error}); give a checkpoint written by megarl"
        ) from error
    if written_format > FORMAT:
        raise UserError(f"{folder} has format {written_format}, this megarl reads up to {FORMAT}; use a newer megarl")
    return facts


def shape_of(config: PretrainedConfig) -> dict[str, Any]:
    """Selects the facts of a HF config that a stored state must match."""
    values = config.to_dict()
    fields = {k: values[k] for k in SHAPE_FIELDS if values.get(k) is not None}
    trained: dict[str, Any] = {"actor.mtp": "train"} if trains_mtp(config) else {}
    if (adapters := adapters_of(config)) is not None:
        fields = {k: v for k, v in dataclasses.asdict(adapters).items() if (k, v) != ("quantization", "none")}
        trained |= {f"actor.lora.{name}": value for name, value in fields.items()}
    return {"model_type": config.model_type, "scalar": is_scalar(config), **fields, **trained}


def check_facts(folder: Path, config: PretrainedConfig, dtype: str) -> None:
    """Refuses a state of another model or dtype.

    Raises:
        UserError: naming the first difference, with both values.
    """
    facts = read_facts(folder)
    stored, current = facts["model"], json.loads(json.dumps(shape_of(config)))
    for name in dict.fromkeys(("model_type", *stored, *current)):
        if stored.get(name) != current.get(name):
            raise UserError(
                f"{folder} is of a {stored['model_type']} model with {name}={stored.get(name)}, this run's has {name}="
                f"{current.get(name)}; resume with the model that the run started with"
            )
    if facts["dtype"] != dtype:
        raise UserError(
            f"{folder} has actor.dtype={facts['dtype']}, this run {dtype}; resume with {facts['dtype']}, or start a "
            "new run from its export (python -m megarl.export)"
        )
