"""Activations that wait on the host for backward, one layer after another."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from transformer_engine.signatures import taken

MIN_ELEMENTS = 256 * 1024  # smaller tensors stay, as in the real one (cpu_offload.py:424)


class Layers:
    """Context of a model's layers, in order. Copies what the first `num_layers` save; `host_bytes` adds up by layer.

    Host and device are one memory here. The order is that of the real one: the backward pass of layer L of N brings
    back layer L - (N - 1 - num_layers) (cpu_offload.py:605).
    """

    made: list[Layers] = []  # noqa: RUF012 (every context, for tests)

    def __init__(self, num_layers: int, model_layers: int) -> None:
        assert num_layers <= model_layers - 1, "Cannot offload all layers without manual synchronization"
        self.num_layers, self.model_layers = num_layers, model_layers
        self.layer, self.inside = -1, False
        self.stream = threading.Lock()  # as little to be copied as a CUDA stream
        self.host: dict[int, list[Tensor]] = {}
        self.reloaded: set[int] = set()
        self.host_bytes = [0] * model_layers
        self.made.append(self)

    def __enter__(self) -> Layers:
        assert not self.inside, "Offloading context was entered without synchronization function being called."
        self.inside, self.layer = True, (self.layer + 1) % self.model_layers
        self.host[self.layer] = []
        self.reloaded.discard(self.layer)
        self._hooks = saved_tensors_hooks(self._push, self._pop)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self.inside = False

    def _push(self, tensor: Tensor) -> Any:
        small = tensor.numel() < MIN_ELEMENTS
        if self.layer >= self.num_layers or small or isinstance(tensor, torch.nn.Parameter):
            return tensor
        self.host[self.layer].append(tensor.detach().clone())
        self.host_bytes[self.layer] += tensor.nbytes
        return self.layer, len(self.host[self.layer]) - 1

    def _pop(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        layer, index = kept
        assert layer in self.reloaded, f"layer {layer} is read before its activations came back"
        return self.host[layer][index]

    def synchronize(self, tensor: Tensor) -> Tensor:
        """Marks the end of a layer, whose backward pass begins with the gradient of its output."""
        assert tensor.requires_grad
        layer, grad_fn = self.layer, tensor.grad_fn
        assert grad_fn is not None
        grad_fn.register_prehook(lambda _: self.reloaded.add(layer - (self.model_layers - 1 - self.num_layers)))
        return tensor


def get_cpu_offload_context(*args: Any, **kwargs: Any) -> Any:
    names = "enabled num_layers model_layers offload_activations"
    a = taken("cpu_offload.get_cpu_offload_context", names, args, kwargs)
    if not a.enabled:
        return contextlib.nullcontext(), lambda x: x
    assert a.offload_activations
    layers = Layers(a.num_layers, a.model_layers)
    return layers, layers.synchronize
