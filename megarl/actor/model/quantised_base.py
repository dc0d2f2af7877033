"""Keeps a frozen model's linear layers in 4 or 8 bits (`weights/quantised.py`) while adapters are trained on it.

A layer makes its weight when it runs, forward and again in backward, and drops it then. Autograd keeps a reference to
the codes. The layers are Megatron's own in every backend. Head, embeddings, norms and routers keep their dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_parameter_registration_hook

from megarl.actor.model.attention.latent import ReplicatedLinear
from megarl.actor.weights.quantised import QuantisedWeight

LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


@contextlib.contextmanager
def built_on_meta(chooses: Callable[[nn.Module, str], bool]) -> Iterator[None]:
    """Context in which chosen parameters get no memory, by their module and name: at most one has it, while built."""

    def on_meta(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or not chooses(module, name):
            return None
        return moved(parameter, "meta")

    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # its result is taken
    try:
        yield
    finally:
        hook.remove()


def without_weights() -> contextlib.AbstractContextManager[None]:
    """Context in which weights of linear layers get no memory."""
    return built_on_meta(lambda module, name: name == "weight" and isinstance(module, LINEAR))


def moved(parameter: nn.Parameter, device: torch.device | str) -> nn.Parameter:
    """A parameter of this shape, dtype and marks on another device, without values."""
    empty = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)  # Megatron's marks
    return empty


def quantise_layers(stage: nn.Module, names: Iterable[str], kind: str, device: torch.device | str) -> None:
    """Puts `QuantisedWeight`, without values, in place of the weights of the stage's modules `names`.

    Other weights that were built `without_weights` get their memory on `device`.
    """
    for name in names:
        module = stage.get_submodule(name)
        weight = module._parameters.pop("weight")
        assert weight is not None, name
        module.quantised = QuantisedWeight(weight, kind, device)
        module.forward = _with_weight(module, module.forward)
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and device != "meta":
                module._parameters[name] = moved(parameter, device)


def weight_of(module: nn.Module) -> Any:
    """A linear module's weight: its parameter, or the codes in its place."""
    return getattr(module, "quantised", None) or module.weight


@dataclass(frozen=True)
class _Saved:
    """Stands for a dequantised weight in autograd: its codes, and how it was viewed."""

    weight: QuantisedWeight
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        return self.weight.read().as_strided(self.size, self.stride, self.offset)


def _with_weight(module: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward `plain` of a module, which then has a weight while it runs."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        stored: QuantisedWeight = module.quantised
        module.weight = stored.read()
        address = module.weight.untyped_storage().data_ptr()

        def keep(tensor: Tensor) -> Tensor | _Saved:
            if tensor.untyped_storage().data_ptr() != address:
                return tensor
            return _Saved(stored, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        try:
            with saved_tensors_hooks(keep, lambda kept: kept.read() if isinstance(kept, _Saved) else kept):
                return plain(*args, **kwargs)
        finally:
            del module.weight

    return forward
