"""SGLang's layout of low-rank adapters: buffers of each rank -> boxes of PEFT's matrices.

SGLang stacks adapters as it stacks the weights under them. With rank r, a module of n parts has, in a slot of its pool:

    A  [n * r, columns of this rank]   `lora_A` of each part in turn; all rows of it on every rank
    B  [rows of this rank, r]          `lora_B` of each part, in the rows that the part has in the weight

So these rules are derived from the weights' (`sglang_layout.py`). A part without an adapter stays zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.families.adapters import LORA_A, LORA_B, SERVED, Adapters
from megarl.knobs import UserError
from megarl.reshard.plan.holdings import Box, Holdings
from megarl.reshard.plan.sglang_blocks import ParameterPart, ServerParameter
from megarl.reshard.plan.sglang_layout import Geometry, padded_for_cpu

STACKS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
HELD = ("qwen2", "qwen3", "llama", "mistral")  # families whose adapters SGLang holds so


def adapter_buffers(geometry: Geometry, adapters: Adapters) -> Iterator[ServerParameter]:
    """Yields the buffers of one slot on a rank: for each module with adapters its A, then its B.

    They are named after the module, as PEFT names its matrices.

    Raises:
        UserError: a family whose adapters SGLang holds otherwise, or not at all.
    """
    if geometry.family not in HELD:
        raise UserError(
            f"actor.lora.sync=adapters: SGLang's pool of adapters is known for {', '.join(HELD)}, not for "
            f"{geometry.family}; set it to merged"
        )
    for weight in geometry.parameters():
        adapted = [part for part in weight.parts if adapters.adapt(part.box.name, (1,) * len(part.box.start))]
        module = weight.name.removesuffix(".weight")
        if not adapted:
            continue
        yield from _buffers(module, weight, adapted, adapters.rank)


def _buffers(
    module: str, weight: ServerParameter, adapted: list[ParameterPart], rank: int
) -> Iterator[ServerParameter]:
    """Yields A and B of one module."""
    leaf = module.rpartition(".")[2]
    stack = STACKS.get(leaf, (leaf,))
    rows, columns = weight.shape
    a, b = [], []
    for part in adapted:
        name, (row, column) = part.box.name.removesuffix(".weight"), part.at
        (top, left), (bottom, right) = part.box.start, part.box.stop
        number = stack.index(name.rpartition(".")[2])
        a.append(ParameterPart((number * rank, column), Box(name + LORA_A, (0, left), (rank, right))))
        b.append(ParameterPart((row, 0), Box(name + LORA_B, (top, 0), (bottom, rank))))
    yield ServerParameter(module + LORA_A, (len(stack) * rank, columns), tuple(a))
    yield ServerParameter(module + LORA_B, (rows, rank), tuple(b))


def slot_elements(config: Any, adapters: Adapters, tp_size: int) -> int:
    """Counts the elements of one adapter's buffers on a server rank, from a HF config alone."""
    buffers = adapter_buffers(Geometry.of(config, 0, tp_size), adapters)
    return sum(math.prod(buffer.shape) for buffer in buffers)


def adapter_holdings(
    config: Any,
    adapters: Adapters,
    names: Sequence[str] = (SERVED,),
    *,
    tp_size: int,
    n_servers: int = 1,
    dtype: str = "bfloat16",
    cpu: bool = False,
) -> Holdings:
    """Holdings of the adapters `names` on the ranks of `n_servers` equal servers, from a HF config alone.

    Raises:
        UserError: see `Geometry.of` and `adapter_buffers`.
    """
    config = padded_for_cpu(config, tp_size) if cpu else config
    geometries = [Geometry.of(config, rank, tp_size) for rank in range(tp_size)]
    ranks = [
        [(part.box, dtype) for buffer in adapter_buffers(geometry, adapters) for part in buffer.parts]
        for geometry in geometries
    ]
    return Holdings.of(ranks * n_servers).of_adapters(names)
