"""Low-rank adapters in Megatron's linear layers (LoRA, arXiv:2106.09685), on every cut of tensor parallelism.

A module's adapter adds `scale * x A^T B^T` to its output. Ranks exchange vectors of `rank` elements only:

    column-parallel   A complete, B by rows      gathers `x A^T` under sequence parallelism
    row-parallel      A by columns, B complete   sums `x A^T` over the ranks
    replicated        both complete

Experts exchange tokens around their layers, not in them. There the gradient of the complete matrix is summed instead.

Experts of a rank that are one module have their adapters in one as well (`GroupedAdapters`), in a loop.

Dropout masks: ranks with the same input drop the same elements. Ranks with different parts of an input draw masks of
their own. All masks of a step follow from its seed, so a resumed run draws them again (`masks_of_step`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megarl.actor.model.quantised_base import weight_of
from megarl.actor.weights.adapter_shards import AdaptedPart
from megarl.parallel.groups import Groups

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc[12])")


class AdapterPart(nn.Module):
    """Matrices of one HF linear layer on this rank: `a [rank, columns]` and `b [rows, rank]`."""

    def __init__(self, rank: int, columns: int, rows: int, like: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
        self.a = nn.Parameter(torch.zeros(rank, columns, **options))
        self.b = nn.Parameter(torch.zeros(rows, rank, **options))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns the matrices. With `parallel.overlap` the hook before it gathers what the last step changed."""
        return self.a, self.b


class Adapter(nn.Module):
    """Adapters of the parts of one linear module."""

    def __init__(
        self, weight: Any, parts: Sequence[AdaptedPart], rank: int, scale: float, dropout: float, groups: Groups
    ) -> None:
        """Builds zeros. `weight` is the module's own, or quantised; its marks say how ranks cut it."""
        super().__init__()
        self.scale, self.dropout, self.enabled = scale, dropout, True
        for part in parts:
            low, high = part.columns
            self.add_module(part.part, AdapterPart(rank, high - low, part.height, weight))
        self._names = [part.part for part in parts]
        self._order = _order(parts, weight.shape[0])
        self.is_expert = ".experts." in parts[0].module
        if self.is_expert:  # Transformer Engine's grouped experts have no marks
            self.cut = 0 if parts[0].module.endswith(".linear_fc1") else 1
        else:
            self.cut = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else -1
        self.group = groups.etp if self.is_expert else groups.tp
        self.sequence_parallel = groups.layout.sequence_parallel and not self.is_expert
        own_input = self.cut == 1 or self.sequence_parallel or (self.is_expert and self.group.size() == 1)
        self._mask_number = groups.tp_rank if own_input else 0
        self._mark(weight)

    def _mark(self, weight: Any) -> None:
        """Gives the matrices Megatron's marks: of cuts, of partial gradients, and of experts."""
        for name in self._names:
            part = self._part(name)
            cut = {0: [part.b], 1: [part.a]}.get(self.cut, [])
            if self.is_expert and self.group.size() == 1:
                cut = [part.a, part.b]  # like weights of uncut experts: each rank counts its part of a norm
            for matrix in cut:
                set_tensor_model_parallel_attributes(matrix, is_parallel=True, dim=max(self.cut, 0), stride=1)
            if self.sequence_parallel:  # gradients of a rank's own tokens: Megatron sums them over tp
                whole = (part.a,) if self.cut == 0 else (part.b,) if self.cut == 1 else (part.a, part.b)
                for matrix in whole:
                    setattr(matrix, "sequence_parallel", True)  # noqa: B010 (torch does not declare it)
            if hasattr(weight, "allreduce"):
                for matrix in (part.a, part.b):
                    setattr(matrix, "allreduce", weight.allreduce)  # noqa: B010

    def _part(self, name: str) -> AdapterPart:
        part: AdapterPart = self.get_submodule(name)  # type: ignore[assignment]
        return part

    def forward(self, x: Tensor) -> Tensor:
        """Computes the addend of the module's output, `[..., rows of this rank]`, from the module's input."""
        if self.dropout and self.training:
            x = self._dropped(x)
        parts = {name: self._part(name)() for name in self._names}
        a = torch.cat([matrix for matrix, _ in parts.values()]) if len(parts) > 1 else parts[self._names[0]][0]
        if self.is_expert and self.cut == 0:
            a = copy_to_tensor_model_parallel_region(a, group=self.group)
        inner = dict(zip(parts, self._exchange(F.linear(x, a)).split(len(a) // len(parts), dim=-1), strict=True))
        outputs = {name: F.linear(inner[name], self._summed(b)) for name, (_, b) in parts.items()}
        first = self._order[0][0]
        if len(self._order) == 1 and first:
            output = outputs[first]
        else:
            (tokens,) = {output.shape[:-1] for output in outputs.values()}
            output = torch.cat(
                [
                    outputs[name][..., row : row + count] if name else x.new_zeros(*tokens, count)
                    for name, row, count in self._order
                ],
                dim=-1,
            )
        return output * self.scale

    def _dropped(self, x: Tensor) -> Tensor:
        """Drops elements by a mask whose seed is drawn on the host: recomputed layers draw the same one again."""
        seed = int(torch.randint(2**62, ())) + self._mask_number
        generator = torch.Generator(x.device).manual_seed(seed)
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.dropout, generator=generator)
        return x * kept / (1 - self.dropout)

    def _summed(self, b: Tensor) -> Tensor:
        """The matrix, whose gradient is summed over the ranks of a row-parallel expert."""
        return copy_to_tensor_model_parallel_region(b, group=self.group) if self.is_expert and self.cut == 1 else b

    def _exchange(self, inner: Tensor) -> Tensor:
        """Brings `x A^T` to the tokens and sums that `B` takes."""
        if self.is_expert or self.cut < 0:
            return inner
        if self.cut == 0:
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(inner, group=self.group)
            return copy_to_tensor_model_parallel_region(inner, group=self.group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return reduce_from_tensor_model_parallel_region(inner, group=self.group)


class GroupedAdapters(nn.Module):
    """Adapters of a module with all experts of a rank. Its children are `Adapter`s, named by the experts' numbers."""

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Computes what is added to the output of experts with `rows` consecutive rows of `x` each."""
        return torch.cat([adapter(part) for adapter, part in zip(self.children(), x.split(rows), strict=True)])


def _order(parts: Sequence[AdaptedPart], height: int) -> list[tuple[str, int, int]]:
    """Lists a module's `height` rows in their order: part, first row of its `b`, and their number.

    The part is "" for rows of weights without an adapter.
    """
    boxes = [(part, box, row) for part in parts if part.height for box, row in part.rows]
    places = sorted((box.at[0], part.part, row, box.stop[0] - box.start[0]) for part, box, row in boxes)
    order, at = [], 0
    for first, part, row, count in places:
        if first > at:
            order.append(("", 0, first - at))
        order.append((part, row, count))
        at = first + count
    return [*order, ("", 0, height - at)] if at < height else order


def attach(
    modules: Sequence[nn.Module],
    parts: Sequence[AdaptedPart],
    rank: int,
    scale: float,
    dropout: float,
    groups: Groups,
) -> None:
    """Freezes the model and adds an adapter to every module that has one of the `parts`. A value head stays trained."""
    by_module: dict[tuple[int, str], list[AdaptedPart]] = {}
    for part in parts:
        by_module.setdefault((part.boxes[0].stage, part.module), []).append(part)
    for stage in modules:
        stage.requires_grad_(False)
    for (number, name), adapted in by_module.items():
        module, weight, expert = _module_of(modules[number], name)
        adapter = Adapter(weight, adapted, rank, scale, dropout, groups)
        if not expert:
            module.add_module("lora", adapter)
            module.register_forward_hook(_add)
            continue
        if not hasattr(module, "lora"):
            module.add_module("lora", GroupedAdapters())
            module.register_forward_hook(_add_grouped)
        module.lora.add_module(expert, adapter)  # type: ignore[union-attr]
    for stage in modules:
        config, embedding = stage.config, getattr(stage, "embedding", None)
        needs_gradient = config.recompute_granularity is not None or config.cpu_offloading  # type: ignore[union-attr]
        if needs_gradient and embedding is not None:
            embedding.register_forward_hook(_require_gradient)


def part_of(modules: Sequence[nn.Module], part: AdaptedPart) -> AdapterPart:
    """Finds the matrices of a part of the model."""
    module, _, expert = _module_of(modules[part.boxes[0].stage], part.module)
    matrices: AdapterPart = module.get_submodule(".".join(filter(None, ("lora", expert, part.part))))  # type: ignore[assignment]
    return matrices


def _module_of(stage: nn.Module, name: str) -> tuple[nn.Module, Any, str]:
    """Finds the module `name` of the local layer spec, its weight, and the expert's index if it holds several."""
    if (match := EXPERT.fullmatch(name)) is not None:
        layer = stage.get_submodule(match["experts"])
        if not hasattr(layer, "local_experts"):
            module = layer.get_submodule(match["linear"])
            return module, getattr(module, f"weight{match['number']}"), match["number"]
    module = stage.get_submodule(name)
    return module, weight_of(module), ""


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Has the first layer's input require a gradient, as layers without adapters are frozen.

    Without one, a recomputed layer gives its adapters none. Transformer Engine brings offloaded activations back when a
    layer's output gets its gradient, and refuses an output without one (cpu_offload.py:885 of TE 2.12.0).
    """
    if torch.is_grad_enabled():
        output.requires_grad_()


def _add(module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
    """Adds the adapter's output to a linear module's, which comes with its bias."""
    adapter: Adapter = module.lora  # type: ignore[assignment]
    if not adapter.enabled:
        return None
    return output[0] + adapter(inputs[0]), output[1]


def _add_grouped(module: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
    """Adds the adapters' output to that of a module of several experts."""
    grouped: GroupedAdapters = module.lora  # type: ignore[assignment]
    if not all(adapter.enabled for adapter in adapters_in([grouped])):
        return None
    return output[0] + grouped(*inputs), output[1]


def adapters_in(modules: Sequence[nn.Module]) -> Iterator[Adapter]:
    """Yields the adapters of these modules."""
    return (child for module in modules for child in module.modules() if isinstance(child, Adapter))


@contextlib.contextmanager
def switched_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the model runs without its adapters: as it was before training."""
    adapters = list(adapters_in(modules))
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


@contextlib.contextmanager
def masks_of_step(seed: int, step: int, groups: Groups) -> Iterator[None]:
    """Context in which dropout masks follow from `seed` and the step's number. They differ between dp, cp and pp ranks.

    Torch's generator on the host is as before at its end.
    """
    text = f"{seed}:{step}:{groups.dp_rank}:{groups.cp_rank}:{groups.pp_rank}"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little"))
        yield
