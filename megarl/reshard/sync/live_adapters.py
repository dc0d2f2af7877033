"""Binds the rules of SGLang's adapters to a live server rank: views of the slot of the trained adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from megarl.families.adapters import LORA_A, LORA_B, MANAGER, SERVED, Adapters
from megarl.reshard.plan.holdings import Fragment
from megarl.reshard.plan.sglang_adapters import adapter_buffers
from megarl.reshard.plan.sglang_layout import Geometry
from megarl.reshard.sync.live_parameters import LayoutError, view_of


def live_adapters(model: nn.Module, geometry: Geometry) -> Iterator[Fragment]:
    """Yields the fragments of the trained adapter on one SGLang rank; none on a server without adapters.

    The slot is filled with zeros first: rows without an adapter, and padding, stay zero.

    Raises:
        LayoutError: the server does not hold the adapter in a slot that stays its own, or differs from the rules.
    """
    manager = getattr(model, MANAGER, None)
    if manager is None:
        return
    uid, adapters = _served(manager)
    slot = manager.memory_pool.uid_to_buffer_id[uid]
    buffers = {
        (number, module, kind): buffer[slot]
        for kind, pool in ((LORA_A, manager.memory_pool.A_buffer), (LORA_B, manager.memory_pool.B_buffer))
        for module, layers in pool.items()
        for number, buffer in enumerate(layers)
    }
    for buffer in buffers.values():
        buffer.zero_()
    rank = f"rank {geometry.rank.tp_rank} of {geometry.rank.tp_size}"
    for rule in adapter_buffers(geometry, adapters):
        buffer = buffers.get(_place_of(rule.name))
        if buffer is None or tuple(buffer.shape) != rule.shape:
            shape = "no such adapter" if buffer is None else list(buffer.shape)
            raise LayoutError(
                f"SGLang holds {rule.name} as {shape} on {rank}, and the rules for {geometry.family} say "
                f"{list(rule.shape)}",
                rule.name,
            )
        for part in rule.parts:
            yield Fragment(geometry.rank.tp_rank, rule.name, part.box, view_of(part, buffer))


def _served(manager: Any) -> tuple[str, Adapters]:
    """Id and shape of the trained adapter.

    Raises:
        LayoutError: the server has none of its name, or one that it may evict.
    """
    found = [(uid, ref) for uid, ref in manager.lora_refs.items() if ref.lora_name == SERVED]
    if not found or not found[0][1].pinned:
        raise LayoutError(
            f"the server keeps no adapter named {SERVED} in a slot of its own; start it by megarl.serve with the "
            "run's knobs",
            SERVED,
        )
    uid = found[0][0]
    config = manager.configs[uid]
    return uid, Adapters(config.r, tuple(config.target_modules))


def _place_of(name: str) -> tuple[int, str, str]:
    """Layer, SGLang's word for the module, and matrix of a buffer, from the name of its rule."""
    kind = LORA_A if name.endswith(LORA_A) else LORA_B
    parts = name.removesuffix(kind).split(".")
    return int(parts[2]), parts[-1], kind
