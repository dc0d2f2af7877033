"""Weights of an engine's model: filled at its start, listed for the servers, saved and loaded as HF checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor import data_parallel
from megarl.actor.config import EngineConfig
from megarl.actor.lora import LoraTraining
from megarl.actor.model import build
from megarl.actor.weights import hf_weights
from megarl.actor.weights.fused_experts import fuse
from megarl.actor.weights.shards import SCORE
from megarl.families import decoder, without_mtp
from megarl.knobs import UserError
from megarl.parallel.groups import Groups


class EngineWeights:
    """The model's parameters on this rank, under the names of HF checkpoints, and its adapters if it has any."""

    def __init__(
        self,
        config: EngineConfig,
        model: PretrainedConfig,
        groups: Groups,
        modules: Sequence[GPTModel],
        trainable: bool,
        *,
        on_base: bool = False,
    ) -> None:
        """Fills the modules from the checkpoint or a seed. A model that is trained by adapters gets them.

        With `on_base`, only a value head is filled: the other parameters are another engine's.
        """
        self.config, self.model, self.groups, self.modules = config, model, groups, modules
        self.dtype = build.DTYPES[config.dtype]
        self.ddps: list[Any] = []  # set once data parallelism wraps the modules
        self.steps = 0  # optimizer steps taken
        only = (SCORE,) if on_base else None
        if config.init == "random":
            hf_weights.initialize_randomly(modules, model, groups, config.init_seed, only)
        else:
            hf_weights.load(modules, model, groups, config.path, config.value_head_std, only)
        self.lora: LoraTraining | None = None
        if trainable and config.lora.rank:
            self.lora = LoraTraining(config.lora, model, groups, modules, config.path)

    def masks_of_step(self) -> AbstractContextManager[None]:
        """Context of a training step, whose number gives adapters their dropout masks."""
        return nullcontext() if self.lora is None else self.lora.masks_of_step(self.steps)

    @property
    def table(self) -> PretrainedConfig:
        """Config whose shards are what is trained: the model's, or its adapters'."""
        return self.model if self.lora is None else self.lora.table

    def shards(self) -> list[hf_weights.Shard]:
        """Lists the boxes of HF tensors that this rank holds, as views of its live parameters. A collective.

        Layers of multi-token prediction are left out, as SGLang's models leave them out. Weights with adapters are
        merged with them when they are read; with actor.lora.sync=adapters the base's own, followed by the adapters.
        """
        data_parallel.complete_parameters(self.ddps)
        stages = self.modules[: self.groups.vpp_size]
        shards = hf_weights.shards(stages, without_mtp(self.model), self.groups)
        if self.lora is None:
            return shards
        return [*shards, *self.lora.shards()] if self.lora.config.sync == "adapters" else self.lora.merged(shards)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the complete HF tensors of `shards` by name, on rank 0's host. A collective.

        Raises:
            UserError: adapters are synced alone, which whole tensors of the base do not carry.
        """
        if self.lora is not None and self.lora.config.sync == "adapters":
            raise UserError("actor.lora.sync=adapters sends no whole tensors; set it to merged, or reshard.path=exact")
        config = without_mtp(self.model)
        return fuse(hf_weights.gather(self.shards(), self.dtype, config, self.groups), decoder(config))

    def save(self, folder: Path) -> None:
        """Writes a HF checkpoint, or the adapters in PEFT's format. A collective."""
        data_parallel.complete_parameters(self.ddps)
        if self.lora is not None:
            self.lora.save(folder, self.dtype)
            return
        shards = hf_weights.shards(self.modules, self.model, self.groups)
        hf_weights.save(shards, self.dtype, self.model, self.groups, folder, self.config.path)

    def load(self, path: str) -> None:
        """Fills the model from a HF checkpoint, or its adapters from PEFT's files."""
        if self.lora is not None:
            self.lora.load(Path(path))
        else:
            hf_weights.load(self.modules, self.model, self.groups, path, self.config.value_head_std)
