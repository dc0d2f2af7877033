"""SGLang's layout by rule: HF config -> parameters of each rank -> boxes of the checkpoint.

The rules plan a transfer before any server runs (`server_holdings`). Inside a server, `sync/live_parameters.py` holds
the live parameters to the same rules and stops the setup where they differ. They follow SGLang 0.5.23:

    qkv_proj      [q heads of this rank; k heads; v heads]; where tp exceeds the KV heads, neighbours hold the same one
    gate_up_proj  [gate rows of this rank; up rows of this rank]
    embeddings    equal shards of the vocabulary, padded to a multiple of 64 (of 64 * tp where that does not divide)
    w13_weight    [experts of this ep rank, gate rows; up rows of this moe-tp rank, hidden]
    w2_weight     [experts of this ep rank, hidden, columns of this moe-tp rank]

On CPU, SGLang adds empty KV groups where tp does not divide the heads, and empty neurons up to a multiple of 32 * tp.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.families import FAMILIES, ExpertNames, attention_biases, head_dim, moe_shape
from megarl.knobs import UserError
from megarl.reshard.plan.holdings import Box, Holdings, Ints

VOCAB_MULTIPLE = 64
CPU_NEURONS = 32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNPADDED = {  # sizes that SGLang pads on CPU, and the names under which it keeps the checkpoint's
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
    "intermediate_size": "original_intermediate_size",
    "moe_intermediate_size": "original_moe_intermediate_size",
}


@dataclass(frozen=True)
class Span:
    """A rank's shard along one dimension: `size` entries from `start` on.

    Entries from `total` on are padding and belong to no entry of the checkpoint.
    """

    start: int
    size: int
    total: int

    @property
    def stop(self) -> int:
        return min(self.start + self.size, self.total)


@dataclass(frozen=True)
class ParameterPart:
    """A box of the checkpoint and the place `at`, in the parameter's dimensions, where it begins in a parameter."""

    at: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class ServerParameter:
    """One parameter of a server rank by the rules: its name in SGLang, its shape and the boxes in it."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[ParameterPart, ...]


@dataclass(frozen=True)
class Geometry:
    """The sizes that decide the parameters of one tensor-parallel rank. `padded_*` are the sizes that SGLang shards."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    experts: int
    expert_intermediate: int
    padded_heads: int
    padded_kv_heads: int
    padded_intermediate: int
    padded_expert_intermediate: int
    tp_rank: int
    tp_size: int
    ep_size: int

    @staticmethod
    def of(config: Any, tp_rank: int, tp_size: int, ep_size: int = 1) -> Geometry:
        """Reads the sizes from a HF config, or from a live SGLang model's config, which SGLang has padded on CPU.

        Raises:
            UserError: an unknown family, or a size that the ranks do not divide.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(f"'{family}' models have no rule for live weight updates; known are {', '.join(FAMILIES)}")
        plain = _unpadded(config)
        moe, padded_moe = moe_shape(plain), moe_shape(config)
        if moe is not None and not all(moe.layers):
            raise UserError(f"a {family} model with dense layers has no rule for live weight updates")
        qkv_bias, output_bias = attention_biases(config)
        geometry = Geometry(
            family=family,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=plain.num_attention_heads,
            kv_heads=plain.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim(plain),
            intermediate=0 if moe else plain.intermediate_size,
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            experts=moe.experts if moe else 0,
            expert_intermediate=moe.width if moe else 0,
            padded_heads=config.num_attention_heads,
            padded_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            padded_intermediate=0 if moe else config.intermediate_size,
            padded_expert_intermediate=padded_moe.width if padded_moe else 0,
            tp_rank=tp_rank,
            tp_size=tp_size,
            ep_size=ep_size,
        )
        geometry._check()
        return geometry

    def _check(self) -> None:
        tp = self.tp_size
        if self.padded_kv_heads % tp and tp % self.padded_kv_heads:
            raise UserError(f"SGLang at tp_size={tp} cannot share out {self.padded_kv_heads} KV heads; change tp_size")
        if tp % self.ep_size:
            raise UserError(f"SGLang's ep_size={self.ep_size} must divide its tp_size={tp}")
        for what, size, ranks in (
            ("attention heads", self.padded_heads, tp),
            ("MLP neurons", self.padded_intermediate, tp),
            ("experts", self.experts, self.ep_size),
            ("neurons of an expert", self.padded_expert_intermediate, tp // self.ep_size),
        ):
            if size % ranks:
                raise UserError(f"SGLang cannot share {size} {what} out to {ranks} ranks at tp_size={tp}; change it")

    @property
    def q_span(self) -> Span:
        """Rows of q_proj, and columns of o_proj, on this rank: entire heads, in rank order."""
        size = self.padded_heads // self.tp_size * self.head_dim
        return Span(self.tp_rank * size, size, self.heads * self.head_dim)

    @property
    def kv_span(self) -> Span:
        """Rows of k_proj and v_proj on this rank. Where tp_size exceeds the KV heads, neighbours hold the same head."""
        replicas = max(1, self.tp_size // self.padded_kv_heads)
        size = max(1, self.padded_kv_heads // self.tp_size) * self.head_dim
        return Span(self.tp_rank // replicas * size, size, self.kv_heads * self.head_dim)

    @property
    def ffn_span(self) -> Span:
        """Rows of gate_proj and up_proj, and columns of down_proj, on this rank."""
        size = self.padded_intermediate // self.tp_size
        return Span(self.tp_rank * size, size, self.intermediate)

    @property
    def expert_span(self) -> Span:
        """Rows of an expert's gate and up projections, and columns of its down projection, on this rank."""
        ranks = self.tp_size // self.ep_size
        size = self.padded_expert_intermediate // ranks
        return Span(self.tp_rank % ranks * size, size, self.expert_intermediate)

    @property
    def vocab_span(self) -> Span:
        """Rows of the embedding and of the output layer on this rank."""
        padded = _round_up(self.vocab, VOCAB_MULTIPLE)
        if padded % self.tp_size:
            padded = _round_up(self.vocab, VOCAB_MULTIPLE * self.tp_size)
        size = padded // self.tp_size
        return Span(self.tp_rank * size, size, self.vocab)

    def outer_parameters(self) -> Iterator[ServerParameter]:
        """Parameters outside the layers."""
        hidden = _full_span(self.hidden)
        yield _stacked(EMBEDDING, [(EMBEDDING, self.vocab_span)], hidden)
        yield _stacked("model.norm.weight", [("model.norm.weight", hidden)])
        if not self.tied:
            yield _stacked(HEAD, [(HEAD, self.vocab_span)], hidden)
        elif not FAMILIES[self.family].sglang_ties_head:
            yield _stacked(HEAD, [(EMBEDDING, self.vocab_span)], hidden)

    def layer_parameters(self) -> Iterator[ServerParameter]:
        """Parameters of one layer, all names without `model.layers.N.`; layers are alike."""
        family = FAMILIES[self.family]
        hidden = _full_span(self.hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _stacked(f"{norm}.weight", [(f"{norm}.weight", hidden)])
        qkv = [("q_proj", self.q_span), ("k_proj", self.kv_span), ("v_proj", self.kv_span)]
        yield _stacked("self_attn.qkv_proj.weight", [(f"self_attn.{n}.weight", s) for n, s in qkv], hidden)
        if self.qkv_bias:
            yield _stacked("self_attn.qkv_proj.bias", [(f"self_attn.{n}.bias", s) for n, s in qkv])
        if self.output_bias:
            yield _stacked("self_attn.o_proj.bias", [("self_attn.o_proj.bias", hidden)])
        yield _stacked("self_attn.o_proj.weight", [("self_attn.o_proj.weight", hidden)], self.q_span)
        if family.qk_norm:
            for norm in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                yield _stacked(norm, [(norm, _full_span(self.head_dim))])
        if family.experts is not None:
            yield from self._experts(family.experts)
        else:
            gate_up = [(f"mlp.{n}.weight", self.ffn_span) for n in ("gate_proj", "up_proj")]
            yield _stacked("mlp.gate_up_proj.weight", gate_up, hidden)
            yield _stacked("mlp.down_proj.weight", [("mlp.down_proj.weight", hidden)], self.ffn_span)

    def _experts(self, names: ExpertNames) -> Iterator[ServerParameter]:
        router = f"{names.block}.gate.weight"
        yield _stacked(router, [(router, _full_span(self.experts))], _full_span(self.hidden))
        local = self.experts // self.ep_size
        first = self.tp_rank // (self.tp_size // self.ep_size) * local
        span, hidden = self.expert_span, _full_span(self.hidden)
        w13: list[ParameterPart] = []
        w2: list[ParameterPart] = []
        for slot in range(local):
            expert = f"{names.block}.experts.{first + slot}"
            gate_up = [(f"{expert}.{n}.weight", span) for n in (names.gate, names.up)]
            w13 += [ParameterPart((slot, *p.at), p.box) for p in _stacked("", gate_up, hidden).parts]
            down = _stacked("", [(f"{expert}.{names.down}.weight", hidden)], span)
            w2 += [ParameterPart((slot, *p.at), p.box) for p in down.parts]
        block = f"{names.block}.experts"
        yield ServerParameter(f"{block}.w13_weight", (local, 2 * span.size, self.hidden), tuple(w13))
        yield ServerParameter(f"{block}.w2_weight", (local, self.hidden, span.size), tuple(w2))

    def parameters(self) -> Iterator[ServerParameter]:
        """Every parameter of this rank."""
        yield from self.outer_parameters()
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for p in self.layer_parameters():
                parts = (ParameterPart(q.at, Box(prefix + q.box.name, q.box.start, q.box.stop)) for q in p.parts)
                yield ServerParameter(prefix + p.name, p.shape, tuple(parts))


def _full_span(size: int) -> Span:
    return Span(0, size, size)


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _stacked(name: str, tensors: list[tuple[str, Span]], *rest: Span) -> ServerParameter:
    """A parameter that stacks shards of checkpoint tensors along its rows; `rest` spans the other dimensions."""
    parts, row = [], 0
    for tensor, span in tensors:
        spans = (span, *rest)
        if all(s.start < s.stop for s in spans):  # else all of it is padding
            box = Box(tensor, tuple(s.start for s in spans), tuple(s.stop for s in spans))
            parts.append(ParameterPart((row, *(0 for _ in rest)), box))
        row += span.size
    return ServerParameter(name, (row, *(s.size for s in rest)), tuple(parts))


def _unpadded(config: Any) -> Any:
    """A copy of a config with the checkpoint's own sizes where SGLang has padded them."""
    plain = copy.copy(config)
    for name, original in UNPADDED.items():
        if hasattr(config, original):
            setattr(plain, name, getattr(config, original))
    return plain


def padded_for_cpu(config: Any, tp_size: int) -> Any:
    """A copy of a HF config with the sizes padded as SGLang pads them on CPU before it builds the model."""
    config = copy.deepcopy(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    config.head_dim = head_dim(config)
    config.original_num_attention_heads, config.original_total_num_kv_heads = heads, kv_heads
    if heads % tp_size or kv_heads % tp_size:
        config.num_key_value_heads = _round_up(kv_heads, tp_size)
        config.num_attention_heads = config.num_key_value_heads * (heads // kv_heads)
    for name in ("moe_intermediate_size", "intermediate_size"):
        if (neurons := getattr(config, name, None)) and neurons % (tp_size * CPU_NEURONS):
            setattr(config, f"original_{name}", neurons)
            setattr(config, name, _round_up(neurons, tp_size * CPU_NEURONS))
    return config


def server_holdings(
    config: Any, *, tp_size: int, ep_size: int = 1, n_servers: int = 1, dtype: str = "bfloat16", cpu: bool = False
) -> Holdings:
    """Holdings of the ranks of `n_servers` equal servers, from a HF config alone; all tensors in one dtype.

    Raises:
        UserError: see `Geometry.of`.
    """
    if cpu:
        config = padded_for_cpu(config, tp_size)
    names: dict[str, int] = {}
    tensor: list[int] = []
    corners: list[Ints] = []  # [rows, start or stop, 2]
    rows: list[int] = []
    for rank in range(tp_size):
        geometry = Geometry.of(config, rank, tp_size, ep_size)
        outer = [part.box for p in geometry.outer_parameters() for part in p.parts]
        inner = [part.box for p in geometry.layer_parameters() for part in p.parts]
        tensor += [names.setdefault(box.name, len(names)) for box in outer]
        for layer in range(geometry.layers):
            prefix = f"model.layers.{layer}."
            tensor += [names.setdefault(prefix + box.name, len(names)) for box in inner]
        corners += [_corners(outer), np.tile(_corners(inner), (geometry.layers, 1, 1))]
        rows.append(len(outer) + len(inner) * geometry.layers)
    start, stop = np.moveaxis(np.concatenate(corners), 1, 0)
    return Holdings(
        names=tuple(names),
        tensor=np.array(tensor, dtype=np.int64),
        start=start,
        stop=stop,
        dtypes=(dtype,),
        dtype=np.zeros(len(tensor), dtype=np.int64),
        holder=np.repeat(np.arange(tp_size), rows),
        holders=tuple(tuple(range(rank, n_servers * tp_size, tp_size)) for rank in range(tp_size)),
    )


def _corners(boxes: list[Box]) -> Ints:
    """`[boxes, start or stop, 2]`; a vector's second dimension is `[0, 1)`."""
    return np.array([((*b.start, 0)[:2], (*b.stop, 1)[:2]) for b in boxes], dtype=np.int64).reshape(-1, 2, 2)
