"""HF weights in and out of Megatron's native parameters.

One table says which box of which HF tensor every native parameter holds (`shards`); loading, exporting and
resharding all read it. A `Shard.view` is a strided view of the native parameter, never a copy:

    linear_qkv   [groups, q_per_group + 2, head_dim, hidden]   q = [:, :-2], k = [:, -2], v = [:, -1]
    linear_fc1   [gate rows of this rank; up rows of this rank]
    embeddings   rows [tp_rank * n, (tp_rank + 1) * n) of the vocabulary, padding cut off
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor import hf_files
from megarl.actor.families import head_dim, is_scalar, local_folder
from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.parallel.broadcast import gather_json
from megarl.parallel.groups import Groups

SCORE = "score.weight"  # the value head

@dataclass(frozen=True)
class Shard:
    """The box `[start, stop)` of HF tensor `name` (of full `shape`) that `view` of a native parameter holds.

    `view` may have more dimensions than the box; reshaped to the box's shape it is equal to it.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    view: Tensor


def shards(modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups) -> list[Shard]:
    """Every box of a HF tensor that this rank's native parameters hold, in the order of the parameters.

    `modules` are this rank's virtual stages.
    """
    return [shard for module in modules for shard in _module_shards(module, config, groups)]


def _module_shards(model: GPTModel, config: PretrainedConfig, groups: Groups) -> list[Shard]:
    result: list[Shard] = []
    rank, size = groups.tp_rank, groups.tp_size

    def rows(name: str, view: Tensor, full_rows: int, offset: int, count: int) -> None:
        tail = tuple(view.shape[1:]) if view.ndim <= 2 else (view.shape[-1],) if view.ndim == 4 else ()
        zeros = (0,) * len(tail)
        result.append(Shard(name, (full_rows, *tail), (offset, *zeros), (offset + count, *tail), view))

    def whole(name: str, param: Tensor) -> None:
        rows(name, param, param.shape[0], 0, param.shape[0])

    def columns(name: str, param: Tensor) -> None:
        height, width = param.shape
        result.append(Shard(name, (height, width * size), (0, rank * width), (height, (rank + 1) * width), param))

    def vocabulary(name: str, param: Tensor) -> None:
        count = min(param.shape[0], max(0, config.vocab_size - rank * param.shape[0]))
        rows(name, param[:count], config.vocab_size, rank * param.shape[0], count)

    def qkv(prefix: str, kind: str, param: Tensor) -> None:
        dim, kv_heads = head_dim(config), config.num_key_value_heads
        per_group = config.num_attention_heads // kv_heads
        local = kv_heads // size
        grouped = param.view(local, per_group + 2, dim, *param.shape[1:])
        for name, heads, view in (
            ("q_proj", per_group, grouped[:, :per_group]),
            ("k_proj", 1, grouped[:, per_group : per_group + 1]),
            ("v_proj", 1, grouped[:, per_group + 1 :]),
        ):
            count = local * heads * dim
            rows(f"{prefix}.{name}.{kind}", view, kv_heads * heads * dim, rank * count, count)

    def gate_up(prefix: str, param: Tensor) -> None:
        half = param.shape[0] // 2
        rows(f"{prefix}.gate_proj.weight", param[:half], half * size, rank * half, half)
        rows(f"{prefix}.up_proj.weight", param[half:], half * size, rank * half, half)

    if model.pre_process:
        vocabulary("model.embed_tokens.weight", model.embedding.word_embeddings.weight)
    for layer in model.decoder.layers:
        _layer_shards(layer, f"model.layers.{layer.layer_number - 1}", whole, columns, qkv, gate_up)
    if model.post_process:
        whole("model.norm.weight", model.decoder.final_layernorm.weight)
        head = model.output_layer.weight
        if is_scalar(config):
            whole(SCORE, head)
        elif not config.tie_word_embeddings:
            vocabulary("lm_head.weight", head)
        elif not model.pre_process and head is not None:  # the last stage holds a copy of the tied embedding
            vocabulary("model.embed_tokens.weight", head)
    return result


def parameters(modules: Sequence[GPTModel]) -> Iterator[torch.nn.Parameter]:
    """The native parameters of this rank's virtual stages."""
    return (param for module in modules for param in module.parameters())


def _layer_shards(
    layer: Any,
    prefix: str,
    whole: Callable[[str, Tensor], None],
    columns: Callable[[str, Tensor], None],
    qkv: Callable[[str, str, Tensor], None],
    gate_up: Callable[[str, Tensor], None],
) -> None:
    attention, mlp = layer.self_attention, layer.mlp
    whole(f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight)
    qkv(f"{prefix}.self_attn", "weight", attention.linear_qkv.weight)
    if attention.linear_qkv.bias is not None:
        qkv(f"{prefix}.self_attn", "bias", attention.linear_qkv.bias)
    for native, name in ((attention.q_layernorm, "q_norm"), (attention.k_layernorm, "k_norm")):
        if getattr(native, "weight", None) is not None:
            whole(f"{prefix}.self_attn.{name}.weight", native.weight)
    columns(f"{prefix}.self_attn.o_proj.weight", attention.linear_proj.weight)
    whole(f"{prefix}.post_attention_layernorm.weight", layer.pre_mlp_layernorm.weight)
    gate_up(f"{prefix}.mlp", mlp.linear_fc1.weight)
    columns(f"{prefix}.mlp.down_proj.weight", mlp.linear_fc2.weight)


class Checkpoint:
    """The safetensors files of a HF checkpoint, read box by box."""

    def __init__(self, path: str) -> None:
        """`path` is a local folder or a hub name, which is fetched.

        Raises:
            UserError: see `local_folder`; or the folder holds no safetensors.
        """
        self.folder = local_folder(path)
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(p.name for p in self.folder.glob("*.safetensors"))
        missing = [f for f in files if not (self.folder / f).is_file()]
        if missing or not files:
            what = f"lacks {missing[0]}" if missing else "holds no *.safetensors"
            raise UserError(f"actor.path={path} {what}; give a HF checkpoint saved with save_pretrained")
        self._files = [safe_open(self.folder / f, framework="pt") for f in files]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (not a dict)

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, shard: Shard) -> Tensor:
        """The elements of the shard's box."""
        part = self._where[shard.name].get_slice(shard.name)
        if tuple(part.get_shape()) != shard.shape:
            raise UserError(
                f"{self.folder}: {shard.name} has shape {tuple(part.get_shape())}, the config asks for {shard.shape}"
            )
        return part[_slices(shard.start, shard.stop)]


def load(
    modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups, path: str, new_head_std: float = 0.0
) -> None:
    """Fills the native parameters from the checkpoint at `path`; padding of the vocabulary is set to zero. A value head
    that the checkpoint does not have is drawn from normal(0, `new_head_std`).

    Raises:
        UserError: a tensor that the model needs is missing or has another shape, or one is left over.
    """
    checkpoint = Checkpoint(path)
    parts = shards(modules, config, groups)
    present = checkpoint.names()
    missing = sorted({s.name for s in parts} - present - {SCORE})
    if missing:
        raise UserError(
            f"actor.path={path} lacks the tensor {missing[0]} ({len(missing)} missing); is it a whole checkpoint?"
        )
    if groups.pp_size == 1:
        known = {s.name for s in parts} | {"lm_head.weight"}
        extra = sorted(n for n in present - known if not n.endswith("rotary_emb.inv_freq"))
        if extra:
            raise UserError(
                f"actor.path={path} has the tensor {extra[0]}, unknown to {config.model_type} ({len(extra)} such); "
                "is it a fine-tuned variant? export it as a plain model"
            )
    with torch.no_grad():
        for param in parameters(modules):
            param.zero_()
        for shard in parts:
            if shard.name in present:
                shard.view.copy_(checkpoint.read(shard).reshape(shard.view.shape))
            else:
                shard.view.copy_(_drawn(shard, seed=0) * new_head_std)


def initialize_randomly(modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups, seed: int) -> None:
    """Fills the native parameters from `seed`: normal(0, initializer_range) matrices, norms one, biases zero.

    Each HF tensor has a generator seeded by its name, so that every layout starts from the same model.
    """
    full: dict[str, Tensor] = {}
    with torch.no_grad():
        for param in parameters(modules):
            param.zero_()
        for shard in shards(modules, config, groups):
            if shard.name.endswith("norm.weight"):
                shard.view.fill_(1.0)
            elif not shard.name.endswith(".bias"):
                if shard.name not in full:
                    full[shard.name] = _drawn(shard, seed) * config.initializer_range
                box = full[shard.name][_slices(shard.start, shard.stop)]
                shard.view.copy_(box.reshape(shard.view.shape))


def _drawn(shard: Shard, seed: int) -> Tensor:
    """The whole HF tensor that the shard is of, from normal(0, 1)."""
    digest = hashlib.sha256(f"{seed}:{shard.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shard.shape, generator=generator)


def gather(modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups) -> Iterator[tuple[str, Tensor]]:
    """Yields every HF tensor whole, by name in the same order on all ranks; a collective of the whole world.

    Rank 0 gets the tensors (on the host); the other ranks get empty ones. One tensor is held at a time. Where
    several ranks hold the same box, the lowest sends it.
    """
    mine = {_key(s): s for s in shards(modules, config, groups)}
    facts = [[s.name, list(s.shape), list(s.start), list(s.stop)] for s in mine.values()]
    owners: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, rank_facts in enumerate(gather_json(facts)):
        for name, shape, start, stop in rank_facts:
            shapes[name] = tuple(shape)
            owners.setdefault(name, {}).setdefault((tuple(start), tuple(stop)), rank)
    dtype = next(parameters(modules)).dtype
    for name in owners:
        full = torch.empty(shapes[name], dtype=dtype) if groups.rank == 0 else torch.empty(0, dtype=dtype)
        for (start, stop), owner in owners[name].items():
            box = _slices(start, stop)
            shape = tuple(b - a for a, b in zip(start, stop, strict=True))
            part = mine[(name, start, stop)].view.detach().reshape(shape) if owner == groups.rank else None
            if owner != 0:
                if groups.rank == 0:
                    part = torch.empty(shape, dtype=dtype, device=platform.device())
                    dist.recv(part, owner)
                elif part is not None:
                    dist.send(part.contiguous(), 0)
            if groups.rank == 0 and part is not None:
                full[box] = part.cpu()
        yield name, full


def _slices(start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a box in its whole tensor."""
    return tuple(slice(a, b) for a, b in zip(start, stop, strict=True))


def _key(shard: Shard) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return shard.name, shard.start, shard.stop


def save(modules: Sequence[GPTModel], config: PretrainedConfig, groups: Groups, folder: Path, source: str) -> None:
    """Writes a HF checkpoint (sharded safetensors, config, and the tokenizer files of `source`) to `folder`.

    A collective of the whole world; rank 0 writes, holding at most one file's tensors.
    """
    tensors = gather(modules, config, groups)
    if groups.rank == 0:
        hf_files.write(folder, tensors, config, local_folder(source))
    else:
        for _ in tensors:
            pass
