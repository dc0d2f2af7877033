"""Block FP8 weights, as DeepSeek-V3, Kimi-K2 and Qwen3 are published in: 8-bit floats, and a scale for each block.

A weight `NAME [rows, columns]` is E4M3. `NAME_scale_inv`, float32 or bfloat16, has an entry per block, of 128 x 128
elements in these checkpoints; blocks at the edges may be smaller. The weight is their product (README_WEIGHTS.md of
DeepSeek-V3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.families.weight_formats import SCALE
from megarl.knobs import UserError

FP8, SCALES = "F8_E4M3", ("F32", "BF16")  # dtypes in the words of safetensors
REMEDY = "copy or download the checkpoint again"


@dataclass(frozen=True)
class BlockFp8:
    """A weight and its scales: tensor `name` of `file`, and the one of its scales in `scale_file`."""

    file: Any
    name: str
    scale_file: Any
    block: tuple[int, int]  # rows and columns of a block

    def check(self) -> None:
        """Refuses tensors of other dtypes or shapes than a weight and its scales have. Reads no values.

        Raises:
            UserError: also names the tensor.
        """
        weight, scales = self.file.get_slice(self.name), self.scale_file.get_slice(self.name + SCALE)
        for name, part, dtypes in ((self.name, weight, (FP8,)), (self.name + SCALE, scales, SCALES)):
            if part.get_dtype() not in dtypes or len(part.get_shape()) != 2:
                raise UserError(
                    f"{name} has dtype {part.get_dtype()} and shape {tuple(part.get_shape())}; block FP8 weights are "
                    f"{FP8} and their scales {' or '.join(SCALES)}, both matrices: write the weights in bfloat16"
                )
        blocks = tuple(-(-size // edge) for size, edge in zip(weight.get_shape(), self.block, strict=True))
        if tuple(scales.get_shape()) != blocks:
            raise UserError(
                f"{self.name}{SCALE} has shape {tuple(scales.get_shape())}, and {tuple(weight.get_shape())} weights in "
                f"blocks of {self.block} have {blocks} scales; {REMEDY}"
            )

    def read(self, box: tuple[slice, ...]) -> Tensor:
        """Computes a box of the weight, in float32. Reads its elements and the scales of the blocks that it cuts.

        Raises:
            UserError: a scale is negative or no number.
        """
        edges = tuple(zip(box, self.block, strict=True))
        blocks = tuple(slice(part.start // edge, -(-part.stop // edge)) for part, edge in edges)
        scales: Tensor = self.scale_file.get_slice(self.name + SCALE)[blocks]
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise UserError(f"{self.name}{SCALE} has scales that are negative or no finite number; {REMEDY}")
        for dim, (part, edge) in enumerate(edges):
            scales = scales.index_select(dim, torch.arange(part.start, part.stop) // edge - part.start // edge)
        elements: Tensor = self.file.get_slice(self.name)[box]
        return elements.float() * scales.float()


def pair(stored: dict[str, Any], quantisation: dict[str, Any], folder: str) -> None:
    """Replaces each FP8 weight and its scales by one entry; `stored` has tensors' `file` and `name` by plain name.

    `quantisation` is the config's entry, empty for plain weights. `folder` is the checkpoint's, for messages.

    Raises:
        UserError: FP8 weights lack scales or a config's entry, or scales lack weights; see also `BlockFp8.check`.
    """
    block: list[int] = quantisation.get("weight_block_size") or [] if quantisation.get("quant_method") == "fp8" else []
    for scale_name in [name for name in stored if block and name.endswith(SCALE)]:
        scale = stored.pop(scale_name)
        weight = stored.get(name := scale_name.removesuffix(SCALE))
        if weight is None:
            raise UserError(f"{folder} has {scale_name} and lacks {name}; {REMEDY}")
        stored[name] = BlockFp8(weight.file, weight.name, scale.file, (block[0], block[1]))
        stored[name].check()
    for name, tensor in stored.items():
        if not isinstance(tensor, BlockFp8) and tensor.file.get_slice(tensor.name).get_dtype().startswith("F8_"):
            lacks = f"lacks its scales {name}{SCALE}" if block else "config.json has no quantization_config with blocks"
            raise UserError(f"{folder}: {name} is in 8 bits, and {lacks}; {REMEDY}")
