"""Shares one frozen model between the engines of a process that train adapters on it.

The second engine builds its modules without memory and takes the first one's parameters, as the same objects. What it
trains is its own: adapters, and a value head. The parameters live as long as one of the engines.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from torch import nn

from megarl.actor.model.heads import ValueHead
from megarl.actor.model.quantised_base import built_on_meta
from megarl.actor.weights.hf_weights import named_tensors
from megarl.actor.weights.quantised import QuantisedWeight
from megarl.families import is_scalar
from megarl.knobs import UserError

# Knobs of an engine that decide the bits, names and shapes of its frozen parameters.
SAME = ("path", "init", "init_seed", "dtype", "backend", "experts", "lora.quantization")


def check_same(engine: Any, base: Any) -> None:
    """Checks that `engine` would build the frozen model that `base`, another `MegatronEngine`, has.

    Raises:
        UserError: naming the knob and both values.
    """
    for name in SAME:
        ours, theirs = (operator.attrgetter(name)(config) for config in (engine.config, base.config))
        if ours != theirs:
            raise UserError(f"actor.{name}={ours} differs from the shared base's {theirs}; give both engines the same")
    if not (engine.config.lora.rank and base.config.lora.rank and engine.trainable and base.trainable):
        raise UserError("actor.lora.rank=0 of an engine leaves no frozen base to share; set it above 0 in both engines")
    if not base.modules:
        raise UserError("the engine whose base is shared has no model; call its initialize first")
    if is_scalar(base.hf_config) and not is_scalar(engine.hf_config):
        raise UserError("a model with a value head has no LM head to share; start the policy first, the critic on it")
    if engine.groups.layout != base.groups.layout:
        raise UserError("engines with different parallel.* knobs share no base; give both the same")


def without_memory() -> contextlib.AbstractContextManager[None]:
    """Context in which modules get parameters on the meta device."""
    return built_on_meta(lambda module, name: True)


def take(module: nn.Module, base: nn.Module) -> None:
    """Gives a module built `without_memory` the parameters of `base`, the same stage of another engine's model.

    A router's bias of the choice of experts, a buffer that training leaves as it is, is shared too.

    Raises:
        RuntimeError: a parameter has no frozen one of its name and shape in `base`.
    """
    frozen = named_tensors(base)
    for name, empty in named_tensors(module).items():
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if isinstance(holder, ValueHead):
            continue
        given = frozen.get(name)
        if isinstance(given, QuantisedWeight) and isinstance(empty, QuantisedWeight) and given.shape == empty.shape:
            holder._modules["quantised"] = given
            continue
        if given is None or given.requires_grad or (given.shape, given.dtype) != (empty.shape, empty.dtype):
            raise RuntimeError(f"{name} has no frozen parameter of its shape in the shared base")
        (holder._parameters if attribute in holder._parameters else holder._buffers)[attribute] = given
    left = [name for name, tensor in module.named_parameters() if tensor.is_meta]
    if left:
        raise RuntimeError(f"{left[0]} was not taken from the shared base")
