"""Binds the rules of SGLang's adapters to a live server rank: views of the slots of the trained adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megarl.families.adapters import LORA_A, LORA_B, MANAGER, Adapters, wire_name
from megarl.reshard.plan.holdings import Fragment
from megarl.reshard.plan.sglang_adapters import adapter_buffers
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync.live_parameters import LayoutError, view_of


def live_adapters(model: nn.Module, geometry: Geometry) -> Iterator[Fragment]:
    """Yields the fragments of all adapters on one SGLang rank, in the server's order; none on a server without any.

    The slots are filled with zeros first: rows without an adapter, and padding, stay zero.

    Raises:
        LayoutError: the server does not hold an adapter in a slot that stays its own, or differs from the rules.
    """
    manager = getattr(model, MANAGER, None)
    if manager is None:
        return
    for uid, ref in manager.lora_refs.items():
        if not ref.pinned:
            raise LayoutError(
                f"the server keeps its adapter {ref.lora_name} in no slot of its own; start it by megarl.serve with "
                "the run's knobs",
                ref.lora_name,
            )
        config = manager.configs[uid]
        shape = Adapters(config.r, tuple(config.target_modules))
        yield from _slot(manager.memory_pool, manager.memory_pool.uid_to_buffer_id[uid], geometry, shape, ref.lora_name)


def _slot(pool: Any, slot: int, geometry: Geometry, adapters: Adapters, adapter: str) -> Iterator[Fragment]:
    """Clears a slot of the pool, and yields the fragments of the adapter in it.

    Raises:
        LayoutError: a buffer differs from the rules.
    """
    buffers = {
        (number, module, kind): buffer[slot]
        for kind, held in ((LORA_A, pool.A_buffer), (LORA_B, pool.B_buffer))
        for module, layers in held.items()
        for number, buffer in enumerate(layers)
    }
    for buffer in buffers.values():
        buffer.zero_()
    rank = f"rank {geometry.rank.tp_rank} of {geometry.rank.tp_size}"
    for rule in adapter_buffers(geometry, adapters):
        buffer, name = buffers.get(_place_of(rule.name)), wire_name(adapter, rule.name)
        if buffer is None or tuple(buffer.shape) != rule.shape:
            shape = "no such adapter" if buffer is None else list(buffer.shape)
            raise LayoutError(
                f"SGLang holds {name} as {shape} on {rank}, and the rules for {geometry.family} say {list(rule.shape)}",
                name,
            )
        for part in rule.parts:
            box = replace(part.box, name=wire_name(adapter, part.box.name))
            yield Fragment(geometry.rank.tp_rank, name, box, view_of(part, buffer))


def _place_of(name: str) -> tuple[int, str, str]:
    """Layer, SGLang's word for the module, and matrix of a buffer, from the name of its rule."""
    kind = LORA_A if name.endswith(LORA_A) else LORA_B
    parts = name.removesuffix(kind).split(".")
    return int(parts[2]), parts[-1], kind
