"""Frozen weights in 4 or 8 bits (QLoRA, arXiv:2305.14314), stored and made again by bitsandbytes.

    nf4         4-bit normal floats: 4.5 bits a weight, with its share of the scales
    blockwise8  8-bit dynamic floats (arXiv:2110.02861): 8.5 bits

A scale, float32, belongs to a block of 64 columns of a row, as in bitsandbytes' own layers. Cuts of a weight divide no
block (`check_cuts`), so every layout has the same values.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from megarl.actor.config import QUANTISED_BITS as BITS
from megarl.actor.config import QUANTISED_BLOCK as BLOCK
from megarl.actor.config import LoraConfig
from megarl.actor.weights.adapter_shards import adapted_parts
from megarl.actor.weights.computed_boxes import ComputedBox, Index
from megarl.actor.weights.shards import shard_specs
from megarl.families import decoder
from megarl.families.adapters import EVERY_LINEAR
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place


def check_library(config: LoraConfig) -> None:
    """Raises UserError if a base is to be quantised and bitsandbytes is not installed."""
    if config.quantization != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"actor.lora.quantization={config.quantization} needs the package bitsandbytes, which is not installed: "
            "pip install megarl[qlora], or set it to none"
        )


def check_cuts(config: LoraConfig, parallel: ParallelConfig, model: PretrainedConfig) -> None:
    """Refuses a base whose rows on a rank are not whole blocks.

    Raises:
        UserError: naming the layer and its columns.
    """
    if config.quantization == "none":
        return
    experts = decoder(model).experts
    single = parallel if experts is None else replace(parallel, ep_size=experts.count)  # experts have one size
    for pp_rank in range(parallel.pp_size):
        for part in adapted_parts(shard_specs(model, single, Place(0, 0, 0, pp_rank, 0, 0, 0)), EVERY_LINEAR):
            low, high = part.columns
            if (high - low) % BLOCK:
                raise UserError(
                    f"actor.lora.quantization={config.quantization} has a scale for {BLOCK} columns, and {part.name} "
                    f"has {high - low} on a rank (parallel.tp_size={parallel.tp_size}, etp_size="
                    f"{parallel.expert_tp_size}); lower the sizes, or set it to none"
                )


@functools.cache
def _functional() -> Any:
    """bitsandbytes' functions. At its import it logs that it cannot download products of 4-bit weights: unused here."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes.functional as functional

    return functional


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Gives the codes, uint8 `[rows, columns * bits / 8]`, and scales, float32 `[rows, columns / 64]`, of a weight."""
    weight = weight.contiguous()
    if kind == "nf4":
        codes, state = _functional().quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    else:
        codes, state = _functional().quantize_blockwise(weight, blocksize=BLOCK)
    return codes.view(len(weight), -1), state.absmax.view(len(weight), -1)


def dequantise(codes: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Makes the weight `[rows, columns]` of `dtype` from its codes and scales."""
    functional, shape = _functional(), torch.Size((len(codes), scales.shape[1] * BLOCK))
    given: dict[str, Any] = {"absmax": scales.flatten(), "shape": shape, "blocksize": BLOCK, "dtype": dtype}
    if kind == "nf4":
        state = functional.QuantState(code=_floats(kind, codes.device), quant_type=kind, **given)
        values = functional.dequantize_4bit(codes.reshape(-1, 1), state)
    else:
        state = functional.QuantState(code=_floats(kind, codes.device), **given)
        values = functional.dequantize_blockwise(codes.contiguous(), state)
    return values.view(shape)


@functools.cache
def _floats(kind: str, device: torch.device) -> Tensor:
    """The values of all codes, float32."""
    functional = _functional()
    values: Tensor = functional.get_4bit_type(kind, device="cpu") if kind == "nf4" else functional.create_dynamic_map()
    return values.to(device)


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight as it comes back from its codes."""
    return dequantise(*quantise(weight, kind), kind, weight.dtype)


class QuantisedWeight(nn.Module):
    """A frozen weight `[rows, columns]` of this rank, in codes. Stands in for a parameter, with that one's marks."""

    requires_grad = False

    def __init__(self, weight: Tensor, kind: str, device: torch.device | str) -> None:
        """Allocates codes and scales on `device` for a weight of the shape, dtype and marks of `weight`."""
        super().__init__()
        self.shape, self.dtype, self.kind = weight.shape, weight.dtype, kind
        rows, columns = weight.shape
        codes = torch.zeros(rows, columns * BITS[kind] // 8, dtype=torch.uint8, device=device)
        self.codes = nn.Parameter(codes, requires_grad=False)
        scales = torch.zeros(rows, columns // BLOCK, dtype=torch.float32, device=device)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.__dict__.update(weight.__dict__)  # Megatron's marks

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, rows: slice = slice(None)) -> Tensor:
        """Makes the weight's rows, `[rows, columns]`."""
        return dequantise(self.codes[rows], self.scales[rows], self.kind, self.dtype)

    @torch.no_grad()
    def write(self, rows: slice, values: Tensor) -> None:
        """Stores the weight's rows."""
        codes, scales = quantise(values.to(self.device, self.dtype), self.kind)
        self.codes[rows] = codes
        self.scales[rows] = scales

    def __getitem__(self, index: Index) -> QuantisedRows:
        """Selects rows, with all their columns."""
        rows, columns = (part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True))
        if columns != (0, self.shape[1]):
            raise ValueError(f"columns {columns} of {self.shape[1]}: a quantised weight is read by complete rows")
        return QuantisedRows(self, slice(*rows))


class QuantisedRows(ComputedBox):
    """Rows of a quantised weight. They can be written as well."""

    def __init__(self, weight: QuantisedWeight, rows: slice) -> None:
        shape = (rows.stop - rows.start, weight.shape[1])
        super().__init__(shape, weight.dtype, weight.codes[rows].data_ptr(), lambda: weight.read(rows))
        self._weight, self._rows = weight, rows

    def copy_(self, values: Tensor) -> None:
        """Stores the values, `shape`."""
        if values.numel():
            self._weight.write(self._rows, values)
