"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model's linear layers, and the mark of a config that stands for them.

A linear layer with the weight `W [out, in]` computes `x W^T + scale * x A^T B^T`, with `A [rank, in]`, `B [out, rank]`.
PEFT names them after the layer: `NAME.lora_A.weight` and `NAME.lora_B.weight`. On the way to servers an
adapter of several has its own name before them: `ADAPTER/NAME.lora_A.weight`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

from torch import Tensor
from transformers import PretrainedConfig

MARK = "trained_adapters"  # attribute of a config; no config.json has it
ALL_LINEAR = "all-linear"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
SERVED = "trained"  # name of the adapter on servers, of a run that trains one
MANAGER = "lora_manager"  # attribute of a served model: SGLang's manager of its adapters


@dataclass(frozen=True)
class Adapters:
    """Rank and factor of the adapters, and the layers that have them: ends of HF module names, or all-linear.

    `quantization` is of the base on which they are trained: that of `actor.lora.quantization`.
    """

    rank: int
    targets: tuple[str, ...]
    alpha: float = 1.0
    rslora: bool = False
    quantization: str = "none"

    @property
    def scale(self) -> float:
        """Factor on an adapter's output: alpha / rank, or alpha / sqrt(rank) (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Adds `scale * b a` to a weight or a box of it, in float32, and rounds to the weight's dtype."""
        return (weight.float() + self.scale * (b.float() @ a.float())).to(weight.dtype)

    def adapt(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the layer with the HF weight `name` has an adapter. `all-linear` leaves out head and routers."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) != 2 or not module.startswith("model.layers."):
            return False
        if self.targets == (ALL_LINEAR,):
            return is_linear(module)
        return any(module.endswith(f".{target}") for target in self.targets)


EVERY_LINEAR = Adapters(1, (ALL_LINEAR,))  # for its `adapt`


def is_adapter(name: str) -> bool:
    """True for the name of an adapter's matrix, False for a weight of the base."""
    return name.endswith((LORA_A, LORA_B))


def wire_name(adapter: str, name: str) -> str:
    """Name of a matrix of `adapter` in a sync: PEFT's alone for SERVED, else behind the adapter's and a slash."""
    return name if adapter == SERVED else f"{adapter}/{name}"


def adapter_named(name: str) -> str:
    """The adapter whose matrix has this name in a sync. Inverse of `wire_name`."""
    adapter, slash, _ = name.rpartition("/")
    return adapter if slash else SERVED


def is_linear(module: str) -> bool:
    """True if a module of a layer is a linear one that adapters may have: projections, and no norm, router or gate."""
    return module.endswith("_proj") or module.rpartition(".")[2] in MORE_PROJECTIONS


MORE_PROJECTIONS = frozenset(
    ("kv_a_proj_with_mqa", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
)


def with_adapters(config: PretrainedConfig, adapters: Adapters) -> PretrainedConfig:
    """Copies the config for the adapters alone. The copy's tensors are the adapters and a value head."""
    marked = copy.deepcopy(config)
    setattr(marked, MARK, adapters)
    return marked


def adapters_of(config: PretrainedConfig) -> Adapters | None:
    """The adapters that a config stands for; None if it stands for the model itself."""
    adapters: Adapters | None = getattr(config, MARK, None)
    return adapters


def without_adapters(config: PretrainedConfig) -> PretrainedConfig:
    """Copies the config for the model itself; returns one without the mark as it is."""
    if adapters_of(config) is None:
        return config
    plain = copy.deepcopy(config)
    delattr(plain, MARK)
    return plain
