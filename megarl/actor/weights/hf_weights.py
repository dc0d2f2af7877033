"""Loads HF weights into Megatron's native parameters, and exports them.

`shards.py` maps boxes of HF tensors to native parameters. `shards` here binds this table to live parameters, as strided
views and never as copies. Loading, exporting, checkpoints and resharding all use it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor.weights import hf_files
from megarl.actor.weights.block_shards import is_buffer
from megarl.actor.weights.computed_boxes import values_of
from megarl.actor.weights.quantised import QuantisedWeight
from megarl.actor.weights.repeated_tensors import EMBEDDING, HEAD, with_repeated
from megarl.actor.weights.shard_spec import ShardSpec
from megarl.actor.weights.shards import SCORE, float32_tensors, shard_specs, tensor_shapes, tensor_specs, world_table
from megarl.families import adapters_of, decoder
from megarl.hub import local_folder
from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.parallel.broadcast import gather_json
from megarl.parallel.groups import Groups
from megarl.parallel.placement import place_of

# Names in the shard table, as in Megatron's local spec (regex) -> names in modules that fuse a norm into
# the following projection, or hold all experts of a layer. No other code knows these names.
TE_SPELLINGS = (
    (r"input_layernorm\.weight$", "self_attention.linear_qkv.layer_norm_weight"),
    (r"pre_mlp_layernorm\.weight$", "mlp.linear_fc1.layer_norm_weight"),
    (r"input_layernorm\.weight$", "self_attention.linear_qkv.norm.weight"),  # actor.recompute=selective
    (r"pre_mlp_layernorm\.weight$", "mlp.linear_fc1.norm.weight"),
    (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$", r"experts.\2.\3\1"),
    (r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.lora\.", r"experts.\2.lora.\1."),
)

COMPARED_ROWS = 4096  # bounds the memory of a comparison
RECEIVED_BYTES = 256 << 20  # of a tensor on rank 0's device at a time, while it is gathered


@dataclass(frozen=True)
class Shard:
    """The box `[start, stop)` of HF tensor `name` (full shape `shape`), and its view of a native parameter.

    A quantised weight has a `QuantisedRows` for a view, and a weight that is merged with adapters a `ComputedBox`.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    view: Any  # Tensor, or ComputedBox

    @property
    def index(self) -> tuple[slice, ...]:
        """Slices of the box in the full HF tensor."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def shards(modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups) -> list[Shard]:
    """Lists every box of a HF tensor in this rank's native parameters, in the order of `shard_specs`.

    `modules` are this rank's virtual stages.

    Raises:
        RuntimeError: the table and the parameters do not match.
    """
    of_adapters = adapters_of(config) is not None
    named = [_of_table(named_tensors(module), of_adapters) for module in modules]
    result, bound = [], set()
    for spec in shard_specs(config, groups.layout, place_of(groups.layout, groups.rank)):
        name, param = native(named[spec.stage], spec)
        view = param[spec.index]
        if any(n != b - a for n, a, b in zip(view.shape, spec.start, spec.stop, strict=True)):
            raise RuntimeError(f"{name} has shape {tuple(param.shape)}, too small for {spec}")
        bound.add((spec.stage, name))
        result.append(Shard(spec.name, spec.shape, spec.start, spec.stop, view))
    filled = [(stage, name) for stage, params in enumerate(named) for name in params if params[name].numel()]
    unbound = [name for stage, name in filled if (stage, name) not in bound]
    if unbound:
        raise RuntimeError(
            f"{unbound[0]} holds no HF tensor ({len(unbound)} such parameters); add it to actor/weights/shards.py"
        )
    return result


def _of_table(named: dict[str, Any], of_adapters: bool) -> dict[str, Any]:
    """Selects the tensors that a table has: adapters and a value head, or all others."""
    if of_adapters:
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    return {name: tensor for name, tensor in named.items() if ".lora." not in name}


def named_tensors(module: GPTModel) -> dict[str, Any]:
    """Parameters by name, and the buffers that hold HF tensors: routers' biases of the choice of experts.

    Quantised weights have the names of the parameters for which they stand.
    """
    buffers = {name: buffer for name, buffer in module.named_buffers() if name.endswith(".router.expert_bias")}
    codes = {name: part for name, part in module.named_modules() if isinstance(part, QuantisedWeight)}
    named = {n: parameter for n, parameter in module.named_parameters() if n.rpartition(".")[0] not in codes}
    return {**named, **{name.removesuffix(".quantised") + ".weight": part for name, part in codes.items()}, **buffers}


def native(params: dict[str, Any], spec: ShardSpec) -> tuple[str, Any]:
    """Finds the shard's parameter and its name, under the names of both layer specs."""
    if spec.param in params:
        return spec.param, params[spec.param]
    for local, fused in TE_SPELLINGS:
        name = re.sub(local, fused, spec.param)
        if name in params:
            return name, params[name]
    raise RuntimeError(f"{spec.param} of {spec.name} is in no module of this rank")


def parameters(modules: Sequence[GPTModel]) -> Iterator[torch.nn.Parameter]:
    """Yields the native parameters of this rank's virtual stages."""
    return (param for module in modules for param in module.parameters())


def load(
    modules: Sequence[GPTModel],
    config: PretrainedConfig,
    groups: Groups,
    path: str,
    new_head_std: float = 0.0,
    only: Collection[str] | None = None,
) -> None:
    """Fills the native parameters from the checkpoint at `path`: of the tensors `only`, or of all.

    Padding of the vocabulary is set to zero. A value head that the checkpoint lacks is drawn from
    normal(0, `new_head_std`).

    Raises:
        UserError: on every rank. A tensor of the model is missing or has another shape, or the checkpoint has an
            unknown tensor. Or a repeated head or embedding differs from the model's one.
    """
    checkpoint = hf_files.Checkpoint(path, config)
    needed, present = tensor_shapes(config), checkpoint.names()
    missing, repeated = sorted(set(needed) - present - {SCORE}), checkpoint.repeated(config)
    if missing:
        raise UserError(
            f"actor.path={path} lacks the tensor {missing[0]} ({len(missing)} missing); is the checkpoint complete?"
        )
    known = {*needed, HEAD, *repeated, *checkpoint.carried(config)}
    extra = sorted(n for n in present - known if not n.endswith("rotary_emb.inv_freq"))
    if extra:
        raise UserError(
            f"actor.path={path} has the tensor {extra[0]}, unknown to {config.model_type} ({len(extra)} in total); "
            "if it is a fine-tuned variant, export it as a plain model"
        )
    if config.tie_word_embeddings and HEAD in present and not _equal(checkpoint, HEAD, EMBEDDING, needed[EMBEDDING]):
        raise UserError(
            f"actor.path={path} has tie_word_embeddings=true, and its {HEAD} differs from {EMBEDDING}; set "
            "tie_word_embeddings to false in its config.json, or remove that tensor"
        )
    for name, original in repeated.items():
        if not _equal(checkpoint, name, original, needed[original]):
            raise UserError(
                f"actor.mtp=train shares the model's embedding and head, and {name} of actor.path={path} differs from "
                f"{original}; set actor.mtp=carry"
            )
    with torch.no_grad():
        for shard in _zeroed(modules, config, groups, only):
            if shard.name in present:
                shard.view.copy_(checkpoint.read(shard.name, shard.shape, shard.index))
            else:
                shard.view.copy_(_drawn(shard, seed=0) * new_head_std)


def _zeroed(
    modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups, only: Collection[str] | None
) -> list[Shard]:
    """Sets the native parameters to zero, and lists their shards: of the tensors `only`, or of all."""
    chosen = [shard for shard in shards(modules, config, groups) if only is None or shard.name in only]
    for tensor in parameters(modules) if only is None else (shard.view for shard in chosen):
        tensor.zero_()
    return chosen


def _equal(checkpoint: hf_files.Checkpoint, name: str, other: str, shape: tuple[int, ...]) -> bool:
    """True if two stored tensors of one shape are equal. Some rows are in memory at a time."""
    for first in range(0, shape[0], COMPARED_ROWS):
        box = (slice(first, min(first + COMPARED_ROWS, shape[0])), slice(0, shape[1]))
        if not torch.equal(checkpoint.read(name, shape, box), checkpoint.read(other, shape, box)):
            return False
    return True


def initialize_randomly(
    modules: Sequence[GPTModel],
    config: PretrainedConfig,
    groups: Groups,
    seed: int,
    only: Collection[str] | None = None,
) -> None:
    """Fills the native parameters from `seed`: normal(0, initializer_range) matrices, gains one, biases zero.

    With `only`, no parameter of another tensor changes.

    Each HF tensor has its own generator, seeded by its name. So every layout starts from the same model.
    """
    name, full = "", torch.empty(0)  # drawn once per tensor: its boxes are adjacent in the list
    zero_centered = decoder(config).zero_centered_norms
    with torch.no_grad():
        for shard in _zeroed(modules, config, groups, only):
            if is_buffer(shard.name):
                shard.view.zero_()
            elif (value := _constant(shard.name, zero_centered)) is not None:
                shard.view.fill_(value)
            else:
                if shard.name != name:
                    name, full = shard.name, _drawn(shard, seed) * config.initializer_range
                shard.view.copy_(full[shard.index])


def _constant(name: str, zero_centered: bool) -> float | None:
    """Initial value of all elements of a tensor: gains are 1, biases 0; None for tensors that are drawn."""
    if name.endswith(("linear_attn.norm.weight", ".dt_bias")):
        return 1.0
    if re.search(r"norm(_embedding|_hidden)?\.weight$", name):
        return 0.0 if zero_centered else 1.0
    return 0.0 if name.endswith((".bias", ".A_log")) else None


def _drawn(shard: Shard, seed: int) -> Tensor:
    """Draws the shard's full HF tensor from normal(0, 1)."""
    return torch.randn(shard.shape, generator=_generator(shard, seed))


def _generator(shard: Shard, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{shard.name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def drawn_uniform(shard: Shard, seed: int) -> Tensor:
    """Draws the shard's full tensor from uniform(-1, 1)."""
    return torch.rand(shard.shape, generator=_generator(shard, seed)) * 2 - 1


def gather(
    local_shards: Sequence[Shard], dtype: torch.dtype, config: PretrainedConfig, groups: Groups
) -> Iterator[tuple[str, Tensor]]:
    """Yields every complete HF tensor with its name, in the order of `tensor_shapes`. A collective of the world.

    `local_shards` are this rank's, of a model with this dtype. Rank 0 gets the tensors, on the host; the others get
    empty ones. Only one tensor is in memory at a time. If several ranks hold the same box, the lowest rank sends it.
    """
    local_views, senders = {(s.name, s.start): s.view for s in local_shards}, _senders(config, groups)
    gather_json(groups.rank)  # NCCL connects all ranks here: a batch of sends connects the world, and waits for all
    for name, spec in tensor_specs(config).items():
        stored_dtype = torch.float32 if spec.float32 or is_buffer(name) else dtype
        if groups.rank != 0:
            boxes = senders[name].get(groups.rank)
            if boxes is not None:
                message = torch.cat([values_of(local_views[name, start]).flatten() for start, _ in boxes])
                _exchange([dist.P2POp(dist.isend, message, 0)])
            yield name, torch.empty(0, dtype=stored_dtype)
            continue
        full = torch.empty(spec.shape, dtype=stored_dtype)
        for start, stop in senders[name].get(0, []):
            _write(full, start, stop, values_of(local_views[name, start]))
        for batch in _batches(
            {rank: boxes for rank, boxes in senders[name].items() if rank != 0}, stored_dtype.itemsize
        ):
            messages = [
                torch.empty(sum(map(_size, boxes)), dtype=stored_dtype, device=platform.device())
                for boxes in batch.values()
            ]
            _exchange([dist.P2POp(dist.irecv, message, rank) for rank, message in zip(batch, messages, strict=True)])
            for boxes, message in zip(batch.values(), messages, strict=True):
                for box, part in zip(boxes, message.split([_size(box) for box in boxes]), strict=True):
                    _write(full, *box, part)
        yield name, full


Corner = tuple[int, ...]
Box = tuple[Corner, Corner]


def _size(box: Box) -> int:
    return math.prod(b - a for a, b in zip(*box, strict=True))


def _write(full: Tensor, start: Corner, stop: Corner, part: Tensor) -> None:
    region = full[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
    region.copy_(part.view(region.shape))


def _exchange(operations: list[dist.P2POp]) -> None:
    """Runs sends and receives as one batch. A single one would connect its two ranks anew under NCCL."""
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _batches(senders: dict[int, list[Box]], itemsize: int) -> Iterator[dict[int, list[Box]]]:
    """Splits the senders of a tensor so that a batch has at most `RECEIVED_BYTES`, or one sender."""
    batch: dict[int, list[Box]] = {}
    size = 0
    for rank, boxes in senders.items():
        nbytes = sum(map(_size, boxes)) * itemsize
        if batch and size + nbytes > RECEIVED_BYTES:
            yield batch
            batch, size = {}, 0
        batch[rank] = boxes
        size += nbytes
    if batch:
        yield batch


def _senders(config: PretrainedConfig, groups: Groups) -> dict[str, dict[int, list[Box]]]:
    """Boxes by HF tensor and sending rank. Every rank computes the same order."""
    table = world_table(config, groups.layout)
    first = np.array([min(ranks) for ranks in table.holders])[table.holder]
    dims = {name: len(shape) for name, shape in tensor_shapes(config).items()}
    result: dict[str, dict[int, list[Box]]] = {name: {} for name in dims}
    assigned: set[tuple[str, Corner]] = set()
    for row in np.argsort(first, kind="stable"):
        name = table.names[table.tensor[row]]
        start, stop = (tuple(corner[row, : dims[name]].tolist()) for corner in (table.start, table.stop))
        if (name, start) not in assigned:
            assigned.add((name, start))
            result[name].setdefault(int(first[row]), []).append((start, stop))
    return result


def save(
    local_shards: Sequence[Shard],
    dtype: torch.dtype,
    config: PretrainedConfig,
    groups: Groups,
    folder: Path,
    source: str,
) -> None:
    """Writes a HF checkpoint (sharded safetensors, config, and the tokenizer files of `source`) to `folder`.

    Tensors of `source` that training carries along are copied. Parameters that are always float32 are written so if
    `source` has them in float32. A collective of the world. Rank 0 writes, holding at most one file's tensors.
    """
    tensors = gather(local_shards, dtype, config, groups)
    if groups.rank == 0:
        carried = hf_files.carried_tensors(source, config, hf_files.carried_names(source, config))
        in_float32 = hf_files.stored_in_float32(source, config, float32_tensors(config))
        trained = (
            (name, tensor if name in in_float32 or is_buffer(name) else tensor.to(dtype)) for name, tensor in tensors
        )
        repeated = hf_files.repeated_names(source, config)
        everything = itertools.chain(with_repeated(trained, repeated), carried)
        hf_files.write(folder, everything, config, local_folder(source))
    else:
        for _ in tensors:
            pass
