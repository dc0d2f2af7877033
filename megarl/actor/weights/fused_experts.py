"""gpt-oss's experts in checkpoints: all experts of a layer in one tensor, gate and up columns in turn, or MXFP4 blocks.

The table of shards names the parts of each expert as other families do: `experts.3.gate_proj.weight [width, hidden]`.
Here these names are found in the fused tensors, and written back into them:

    gate_up_proj       [experts, hidden, 2 * width]; column 2 i is row i of the gate, column 2 i + 1 row i of up
    gate_up_proj_bias  [experts, 2 * width], in the same order
    down_proj          [experts, width, hidden], and down_proj_bias [experts, hidden]

Quantised, `gate_up_proj_blocks [experts, 2 * width, hidden / 32, 16]` and `gate_up_proj_scales [experts, 2 * width,
hidden / 32]` hold the transpose. So do the blocks and scales of `down_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megarl.actor.weights.joined_tensors import TensorPart, joined
from megarl.actor.weights.mxfp4 import BLOCK, dequantise
from megarl.families.blocks import Decoder, Experts
from megarl.knobs import UserError

PART = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(weight|bias)$")
PARTS = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}  # turn among columns


@dataclass(frozen=True)
class ExpertSlice:
    """One part of one expert in a fused tensor `name` of `file`, or in its blocks and `scales`."""

    file: Any
    name: str
    expert: int
    turn: int | None  # 0: gate, 1: up, which take turns; None: down
    scales: Any = None  # file of the scales of quantised weights

    def read(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> Tensor:
        """Reads a box of the expert's tensor, which must have `shape`.

        Raises:
            UserError: the fused tensor has another shape.
        """
        rows, step = box[0], 1 if self.turn is None else 2
        stored_rows = slice(rows.start * step, rows.stop * step)
        stored = self.file.get_slice(self.name)
        wide = (shape[0] * step, *shape[1:])  # of both parts
        if self.scales is not None:
            wide = (*wide[:-1], wide[-1] // BLOCK, BLOCK // 2)
        elif len(wide) == 2:
            wide = wide[::-1]
        if tuple(stored.get_shape())[1:] != wide or stored.get_shape()[0] <= self.expert:
            raise UserError(
                f"{self.name} has shape {tuple(stored.get_shape())}, the config asks for {wide} of at least "
                f"{self.expert + 1} experts; correct config.json"
            )
        entry = slice(self.expert, self.expert + 1)
        if len(shape) == 1:
            part = stored[entry, stored_rows][0]
        elif self.scales is None:
            part = stored[entry, box[1], stored_rows][0].t()
        else:
            columns = slice(box[1].start // BLOCK, -(-box[1].stop // BLOCK))
            scales = self.scales.get_slice(self.name.removesuffix("_blocks") + "_scales")
            part = dequantise(stored[entry, stored_rows, columns][0], scales[entry, stored_rows, columns][0])
            first = columns.start * BLOCK
            part = part[:, box[1].start - first : box[1].stop - first]
        return part if self.turn is None else part[self.turn :: step]


def fused_format(model: Decoder) -> bool:
    """True if checkpoints of the model hold experts as gpt-oss's do."""
    return any(isinstance(layer.mlp, Experts) and layer.mlp.names.interleaved for layer in model.layers)


def split(stored: dict[str, Any], model: Decoder) -> None:
    """Replaces the fused tensors of a checkpoint by the parts of all experts; `stored` has tensors' `file` by name."""
    for layer, block in enumerate(shape.mlp for shape in model.layers):
        if not (isinstance(block, Experts) and block.names.interleaved):
            continue
        prefix = f"model.layers.{layer}.{block.names.block}.experts"
        names = {"gate": block.names.gate, "up": block.names.up, "down": block.names.down}
        for fused in ("gate_up_proj", "down_proj"):
            parts = [(names[part], turn) for part, (tensor, turn) in PARTS.items() if tensor == fused]
            plain, bias, blocks, scales = (
                tensor.file if (tensor := stored.pop(f"{prefix}.{fused}{kind}", None)) is not None else None
                for kind in ("", "_bias", "_blocks", "_scales")
            )
            for expert in range(block.count):
                for part, turn in parts:
                    name = f"{prefix}.{expert}.{part}"
                    if plain is not None:
                        stored[f"{name}.weight"] = ExpertSlice(plain, f"{prefix}.{fused}", expert, turn)
                    elif blocks is not None and scales is not None:
                        quantised = f"{prefix}.{fused}_blocks"
                        stored[f"{name}.weight"] = ExpertSlice(blocks, quantised, expert, turn, scales)
                    if bias is not None:
                        stored[f"{name}.bias"] = ExpertSlice(bias, f"{prefix}.{fused}_bias", expert, turn)


def fuse(tensors: Iterable[tuple[str, Tensor]], model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors under the names of a checkpoint: parts of experts as fused tensors, all others as they are."""
    return joined(tensors, partial(_part, model)) if fused_format(model) else iter(tensors)


def _part(model: Decoder, name: str, tensor: Tensor) -> TensorPart | None:
    """Finds the place of a tensor in a fused one; None if it is no part of an expert."""
    match = PART.match(name)
    if match is None:
        return None
    prefix, expert, module, kind = match.groups()
    block = model.layers[int(prefix.split(".")[2])].mlp
    assert isinstance(block, Experts)
    names = {block.names.gate: "gate", block.names.up: "up", block.names.down: "down"}
    stored, turn = PARTS[names[module]]
    step = 1 if turn is None else 2
    return TensorPart(
        name=f"{prefix}.{stored}" + ("_bias" if kind == "bias" else ""),
        shape=(block.count, *tensor.shape[:0:-1], tensor.shape[0] * step),
        index=(int(expert), ..., slice(turn, None, step)),
        values=tensor.t() if tensor.dim() == 2 else tensor,
        count=block.count * step,
    )
