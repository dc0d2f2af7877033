"""SGLang's adapters (LoRA) on a machine without a GPU: its `torch_native` backend, without pinned memory.

SGLang 0.5.23 pins a few small index tensors in host memory for copies to a GPU (`lora/layers.py`,
`lora/backend/torch_backend.py`). Without a GPU torch refuses to pin. Here those tensors lie in ordinary memory; all
else is SGLang's own. Its other backends are Triton kernels.

SGLang imports every module of this package in its scheduler, before it builds the model.
"""

import functools
import types
from typing import Any

import torch
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend


class Pageable(types.ModuleType):
    """`torch`, whose constructors leave out `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _without_pins(make: Any) -> Any:
    @functools.wraps(make)
    def make_pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = make(*args, **kwargs)
        return tensor

    return make_pageable


pageable = Pageable("torch")
pageable.tensor, pageable.zeros = _without_pins(torch.tensor), _without_pins(torch.zeros)  # type: ignore[attr-defined]
layers.torch = torch_backend.torch = pageable
torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign,assignment,return-value]
