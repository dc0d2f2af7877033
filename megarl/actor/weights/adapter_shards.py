"""Shards of low-rank adapters, made from the shards of the weights that they adapt.

A rank with rows `[a, b)` and columns `[c, d)` of a HF weight holds rows `[a, b)` of its `lora_B` and columns `[c, d)`
of its `lora_A`. In the module of the weight, `model/adapters.py` has them as `lora.PART.a` and `lora.PART.b`, where
PART is the last word of the HF module's name. Megarl's fused modules have several parts, such as q_proj and k_proj.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megarl.actor.config import LoraConfig
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.families.adapters import EVERY_LINEAR, LORA_A, LORA_B, Adapters

SCORE = "score.weight"  # a value head is trained beside the adapters


@dataclass(frozen=True)
class AdaptedPart:
    """Part of a module that has an adapter: this rank's boxes of one HF weight, in the order of its rows."""

    name: str  # of the HF module
    boxes: tuple[ShardSpec, ...]

    @property
    def part(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def module(self) -> str:
        """Name of the module in its stage, under Megatron's local layer spec."""
        return self.boxes[0].param.removesuffix(".weight")

    @property
    def columns(self) -> tuple[int, int]:
        """First and last column of the HF weight on this rank."""
        return self.boxes[0].start[1], self.boxes[0].stop[1]

    @property
    def rows(self) -> list[tuple[ShardSpec, int]]:
        """Each box, with its first row in `b`."""
        result, row = [], 0
        for box in self.boxes:
            result.append((box, row))
            row += box.stop[0] - box.start[0]
        return result

    @property
    def height(self) -> int:
        """Rows of the HF weight on this rank."""
        return sum(box.stop[0] - box.start[0] for box in self.boxes)


def shape_of(config: LoraConfig) -> Adapters | None:
    """Shape of the configured adapters, for tables of shards; None without adapters."""
    if not config.rank:
        return None
    return Adapters(config.rank, tuple(config.targets), config.alpha, config.rslora, config.quantization)


def linear_modules(specs: Iterable[ShardSpec]) -> dict[int, list[str]]:
    """Names of the linear modules in a model's layers, by stage: those that adapters may have, and experts."""
    names: dict[int, dict[str, None]] = {}
    for part in adapted_parts(specs, EVERY_LINEAR):
        names.setdefault(part.boxes[0].stage, {})[part.module] = None
    return {stage: list(modules) for stage, modules in names.items()}


def adapted_parts(specs: Iterable[ShardSpec], adapters: Adapters) -> list[AdaptedPart]:
    """Groups a rank's shards of weights into the parts that have adapters, in the order of the table.

    With more tensor parallel ranks than key heads, a rank may have no rows of q_proj, k_proj or v_proj. Its part then
    has an empty box: every rank of the group exchanges `x A^T` of all three.
    """
    boxes: dict[tuple[int, str], list[ShardSpec]] = {}
    for spec in specs:
        for name in _names_of_module(spec):
            if adapters.adapt(name, spec.shape):
                boxes.setdefault((spec.stage, name), []).append(
                    spec if name == spec.name else _without_rows(spec, name)
                )
    return [
        AdaptedPart(name.removesuffix(".weight"), tuple(sorted(_rows_only(parts), key=lambda box: box.start)))
        for (_, name), parts in boxes.items()
    ]


def _names_of_module(spec: ShardSpec) -> list[str]:
    """Lists the HF weights of a shard's parameter, in one order on all ranks: its own, or attention's three."""
    if not spec.param.endswith(".linear_qkv.weight"):
        return [spec.name]
    prefix = spec.name.removesuffix("_proj.weight")[:-1]
    return [f"{prefix}{letter}_proj.weight" for letter in "qkv"]


def _without_rows(spec: ShardSpec, name: str) -> ShardSpec:
    """Empty box of the HF weight `name`, whose parameter is that of `spec`."""
    return replace(spec, name=name, start=(0, 0), stop=(0, spec.stop[1]), at=(0, 0))


def _rows_only(boxes: list[ShardSpec]) -> list[ShardSpec]:
    """The boxes that have rows, or one without."""
    return [box for box in boxes if box.stop[0] > box.start[0]] or boxes[:1]


def adapter_shards(specs: list[ShardSpec], adapters: Adapters) -> Iterator[ShardSpec]:
    """Yields the shards of a rank's adapters, and of a value head, from its shards of the model's weights."""
    rank = adapters.rank
    for part in adapted_parts(specs, adapters):
        first = part.boxes[0]
        (height, width), (low, high) = first.shape, part.columns
        prefix = f"{part.module}.lora.{part.part}"
        yield ShardSpec(part.name + LORA_A, (rank, width), (0, low), (rank, high), first.stage, f"{prefix}.a", (0, 0))
        for begin, end, row in _joined(part):
            yield ShardSpec(
                part.name + LORA_B, (height, rank), (begin, 0), (end, rank), first.stage, f"{prefix}.b", (row, 0)
            )
    yield from (spec for spec in specs if spec.name == SCORE)


def _joined(part: AdaptedPart) -> list[tuple[int, int, int]]:
    """First and last HF row of each run of adjacent boxes, and its first row in `b`."""
    runs: list[tuple[int, int, int]] = []
    for box, row in part.rows:
        if box.start[0] == box.stop[0]:
            continue
        if runs and runs[-1][1] == box.start[0]:
            runs[-1] = (runs[-1][0], box.stop[0], runs[-1][2])
        else:
            runs.append((box.start[0], box.stop[0], row))
    return runs
