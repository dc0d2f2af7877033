"""Trains low-rank adapters on a frozen model: builds them, merges them for the servers, reads and writes PEFT's files.

A merge starts from the base's own bits each time, so merges of many steps do not drift.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.config import LoraConfig
from megarl.actor.model import adapters
from megarl.actor.weights import hf_weights
from megarl.actor.weights.adapter_shards import SCORE, AdaptedPart, adapted_parts, shape_of
from megarl.actor.weights.computed_boxes import ComputedBox, View, values_of
from megarl.actor.weights.hf_weights import Shard
from megarl.actor.weights.peft_files import PREFIX, WEIGHTS, check_peft, write
from megarl.actor.weights.shards import shard_specs, tensor_shapes
from megarl.families import with_adapters
from megarl.families.adapters import LORA_A, LORA_B
from megarl.knobs import UserError
from megarl.parallel.groups import Groups
from megarl.parallel.placement import place_of


class LoraTraining:
    """Adapters of an engine's model. The base is frozen."""

    def __init__(
        self, config: LoraConfig, model: PretrainedConfig, groups: Groups, modules: Sequence[Any], source: str
    ) -> None:
        """Adds adapters to the modules and fills them: from `actor.lora.path`, or with A drawn and B zero.

        `source` is the path of the base.
        """
        self.config, self.model, self.groups, self.modules, self.source = config, model, groups, modules, source
        shape = shape_of(config)
        assert shape is not None, "a rank above 0"
        self.shape = shape
        self.table = with_adapters(model, shape)
        specs = shard_specs(model, groups.layout, place_of(groups.layout, groups.rank))
        self._parts = adapted_parts(specs, shape)
        adapters.attach(modules, self._parts, config.rank, shape.scale, config.dropout, groups)
        for name, parameter in (item for module in modules for item in module.named_parameters()):
            if name == "output_layer.weight" and SCORE in tensor_shapes(self.table):
                parameter.requires_grad_(True)
        if config.path:
            self.load(Path(config.path))
        else:
            self._draw()

    def shards(self) -> list[Shard]:
        """Lists the boxes of adapters on this rank, as views of live parameters."""
        return hf_weights.shards(self.modules, self.table, self.groups)

    @torch.no_grad()
    def _draw(self) -> None:
        """Fills A with PEFT's uniform(-1, 1) / sqrt(columns), from a generator for each tensor, and B with zeros."""
        for shard in self.shards():
            if shard.name.endswith(LORA_A):
                drawn = hf_weights.drawn_uniform(shard, self.config.init_seed) / math.sqrt(shard.shape[1])
                shard.view.copy_(drawn[shard.index])
            elif shard.name.endswith(LORA_B):
                shard.view.zero_()

    # -- merging ---------------------------------------------------------------------------------------------

    def merged(self, shards: Sequence[Shard]) -> list[Shard]:
        """The model's shards with the adapters added when they are read. Others stay views of live parameters."""
        boxes = {(part.name + ".weight", box.start): (part, row) for part in self._parts for box, row in part.rows}
        result = []
        for shard in shards:
            if (part_and_row := boxes.get((shard.name, shard.start))) is None:
                result.append(shard)
                continue
            merge = functools.partial(self._merge, shard.view, *part_and_row)
            box = ComputedBox(tuple(shard.view.shape), shard.view.dtype, shard.view.data_ptr(), merge)
            result.append(dataclasses.replace(shard, view=box))
        return result

    @torch.no_grad()
    def _merge(self, view: View, part: AdaptedPart, row: int) -> Tensor:
        """Adds the adapter of a part to its box of a weight, which has the rows of `b` from `row` on."""
        a, b = self._matrices(part)
        return self.shape.merge(values_of(view), a, b[row : row + view.shape[0]])

    def _matrices(self, part: AdaptedPart) -> tuple[Tensor, Tensor]:
        """A and B of a part on this rank."""
        adapter = adapters.part_of(self.modules, part)
        return adapter.a.detach(), adapter.b.detach()

    def switched_off(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model is the base."""
        return adapters.switched_off(self.modules)

    def masks_of_step(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Context of a training step, whose number gives dropout its masks."""
        if not self.config.dropout:
            return contextlib.nullcontext()
        return adapters.masks_of_step(self.config.init_seed, step, self.groups)

    # -- PEFT's files ----------------------------------------------------------------------------------------

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes the adapters in PEFT's format to `folder`. A collective; rank 0 writes."""
        tensors = dict(hf_weights.gather(self.shards(), dtype, self.table, self.groups))
        if self.groups.rank == 0:
            write(folder, tensors, self.shape, self.config.dropout, self.source)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Fills the adapters from PEFT's files.

        Raises:
            UserError: see `check_peft`; or a tensor is missing, unknown, or has another shape.
        """
        check_peft(folder, self.config)
        try:
            file = safe_open(folder / WEIGHTS, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"actor.lora.path={folder}: {WEIGHTS} cannot be read ({error}); give a folder that PEFT or megarl wrote"
            ) from error
        stored, shapes = set(file.keys()), tensor_shapes(self.table)
        needed = {PREFIX + name for name in shapes if name != SCORE or PREFIX + name in stored}
        if needed != stored:
            name = sorted(needed ^ stored)[0]
            which = "lacks" if name in needed else "has"
            raise UserError(
                f"actor.lora.path={folder} {which} the tensor {name}, and actor.lora.targets="
                f"{','.join(self.config.targets)} of this model {'asks for it' if which == 'lacks' else 'does not'}; "
                "give the adapter of this base, and its target_modules"
            )
        for shard in self.shards():
            if PREFIX + shard.name not in stored:
                continue
            part = file.get_slice(PREFIX + shard.name)
            if tuple(part.get_shape()) != shard.shape:
                raise UserError(
                    f"actor.lora.path={folder}: {shard.name} has shape {tuple(part.get_shape())}, this model's has "
                    f"{shard.shape}; give an adapter of this base, with actor.lora.rank of its rank"
                )
            shard.view.copy_(part[shard.index])
