"""SGLang's layout by rule: HF config -> parameters of each rank -> boxes of the checkpoint.

The rules plan a transfer before any server runs (`server_holdings`). Inside a server, `sync/live_parameters.py` holds
the live parameters to the same rules and stops the setup where they differ. They follow SGLang 0.5.23:

    qkv_proj      [q heads of this rank; k heads; v heads]; where tp exceeds the KV heads, neighbours hold the same one
    gate_up_proj  [gate rows of this rank; up rows of this rank]
    embeddings    equal shards of the vocabulary, padded to a multiple of 64 (of 64 * tp where that does not divide)
    w13_weight    [experts of this ep rank, gate rows; up rows of this moe-tp rank, hidden]
    w2_weight     [experts of this ep rank, hidden, columns of this moe-tp rank]
    gpt-oss       gate and up rows of w13_weight in turn; biases of w2 on the first rank; sinks of this rank's heads

On CPU, SGLang adds empty KV groups where tp does not divide the heads, and empty neurons up to a multiple of 32 * tp.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.families import FAMILIES, decoder, text_part
from megarl.families.blocks import Attention, Decoder, DeltaNet, Experts, LatentAttention, Layer, Mlp
from megarl.families.rotary import head_dim
from megarl.families.weight_formats import ServedFormat
from megarl.knobs import UserError
from megarl.reshard.plan.holdings import Box, Holdings, Ints
from megarl.reshard.plan.quantised import quantised_parameters
from megarl.reshard.plan.sglang_blocks import (
    ServerParameter,
    Span,
    TpRank,
    attention_parameters,
    expert_parameters,
    full_span,
    latent_parameters,
    mlp_parameters,
    round_up,
    stacked,
)
from megarl.reshard.plan.sglang_delta_net import delta_net_parameters

VOCAB_MULTIPLE = 64
CPU_NEURONS = 32
NEURONS = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size")  # padded to such multiples
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNPADDED = {  # sizes that SGLang pads on CPU, and the names under which it keeps the checkpoint's
    "num_attention_heads": "original_num_attention_heads",
    "num_key_value_heads": "original_total_num_kv_heads",
    "intermediate_size": "original_intermediate_size",
    "moe_intermediate_size": "original_moe_intermediate_size",
    "shared_expert_intermediate_size": "original_shared_expert_intermediate_size",
}


@dataclass(frozen=True)
class Geometry:
    """A model on one rank of a server: as in the checkpoint, and `padded` as SGLang shards it."""

    family: str
    model: Decoder
    padded: Decoder
    rank: TpRank
    format: ServedFormat | None = None  # of the linear layers; None: they are as the others

    @staticmethod
    def of(config: Any, tp_rank: int, tp_size: int, ep_size: int = 1, format: ServedFormat | None = None) -> Geometry:
        """Reads a HF config, or a live SGLang model's config, which SGLang has padded on CPU.

        Raises:
            UserError: an unknown family, or a size that the ranks do not divide.
        """
        config = text_part(config)
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(f"'{family}' models have no rule for live weight updates; known are {', '.join(FAMILIES)}")
        if tp_size % ep_size:
            raise UserError(f"SGLang's ep_size={ep_size} must divide its tp_size={tp_size}")
        rank = TpRank(tp_rank, tp_size, ep_size)
        if format is not None:
            _check_format(family, format)
        geometry = Geometry(family, decoder(_unpadded(config)), decoder(config), rank, format)
        for layer, padded in set(geometry.layers):
            list(geometry.layer_parameters(layer, padded))  # refuses what the ranks cannot share out
        return geometry

    @property
    def layers(self) -> list[tuple[Layer, Layer]]:
        """Each layer as in the checkpoint, and as SGLang shards it."""
        return list(zip(self.model.layers, self.padded.layers, strict=True))

    @property
    def vocab_span(self) -> Span:
        """Rows of the embedding and of the output layer on this rank."""
        vocab, tp = self.model.vocab, self.rank.tp_size
        padded = round_up(vocab, VOCAB_MULTIPLE)
        return self.rank.span(vocab, round_up(vocab, VOCAB_MULTIPLE * tp) if padded % tp else padded)

    def outer_parameters(self) -> Iterator[ServerParameter]:
        """Parameters outside the layers."""
        hidden = full_span(self.model.hidden)
        family = FAMILIES[self.family]
        rows = self.vocab_span if family.sglang_shards_embedding else full_span(self.model.vocab)
        yield stacked(EMBEDDING, [(EMBEDDING, rows)], hidden)
        yield stacked("model.norm.weight", [("model.norm.weight", hidden)])
        if not self.model.tied:
            yield stacked(HEAD, [(HEAD, self.vocab_span)], hidden)
        elif not family.sglang_ties_head:
            yield stacked(HEAD, [(EMBEDDING, self.vocab_span)], hidden)

    def layer_parameters(self, layer: Layer, padded: Layer) -> Iterator[ServerParameter]:
        """Yields the parameters of one layer, all names without `model.layers.N.`.

        Raises:
            UserError: the ranks do not divide a size, or cut a block of a quantised server.
        """
        for parameter in self._plain_parameters(layer, padded):
            if self.format is None:
                yield parameter
            else:
                yield from quantised_parameters(parameter, self.format, self.rank)

    def _plain_parameters(self, layer: Layer, padded: Layer) -> Iterator[ServerParameter]:
        """Yields the parameters of one layer, none quantised."""
        hidden = self.model.hidden
        outer = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if layer.sandwich else ()
        for norm in ("input_layernorm", "post_attention_layernorm", *outer):
            yield stacked(f"{norm}.weight", [(f"{norm}.weight", full_span(hidden))])
        if isinstance(layer.attention, LatentAttention):
            yield from latent_parameters(layer.attention, hidden, self.rank)
        elif isinstance(layer.attention, DeltaNet):
            yield from delta_net_parameters(layer.attention, hidden, self.rank)
        else:
            assert isinstance(padded.attention, Attention)
            yield from attention_parameters(layer.attention, padded.attention, hidden, self.rank)
        if isinstance(layer.mlp, Experts):
            assert isinstance(padded.mlp, Experts)
            yield from expert_parameters(layer.mlp, padded.mlp, hidden, self.rank)
        else:
            assert isinstance(padded.mlp, Mlp)
            yield from mlp_parameters(layer.mlp, padded.mlp, hidden, self.rank)

    def parameters(self) -> Iterator[ServerParameter]:
        """Every parameter of this rank."""
        yield from self.outer_parameters()
        for number, (layer, padded) in enumerate(self.layers):
            prefix = f"model.layers.{number}."
            for p in self.layer_parameters(layer, padded):
                parts = (replace(q, box=Box(prefix + q.box.name, q.box.start, q.box.stop)) for q in p.parts)
                yield ServerParameter(prefix + p.name, p.shape, tuple(parts))


def _check_format(family: str, format: ServedFormat) -> None:
    """Refuses the families whose quantised servers have no rules."""
    if family not in format.families:
        raise UserError(
            f"server.quantization={format.name} is for models of {', '.join(format.families)}, not {family}; set it to "
            "none"
        )


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
        config.num_key_value_heads = round_up(kv_heads, tp_size)
        config.num_attention_heads = config.num_key_value_heads * (heads // kv_heads)
    for name in NEURONS:
        if (neurons := getattr(config, name, None)) and neurons % (tp_size * CPU_NEURONS):
            setattr(config, f"original_{name}", neurons)
            setattr(config, name, round_up(neurons, tp_size * CPU_NEURONS))
    return config


def server_holdings(
    config: Any,
    *,
    tp_size: int,
    ep_size: int = 1,
    n_servers: int = 1,
    dtype: str = "bfloat16",
    cpu: bool = False,
    format: ServedFormat | None = None,
) -> Holdings:
    """Holdings of the ranks of `n_servers` equal servers, from a HF config alone; all tensors in one dtype.

    Linear layers are in `format`, if there is one.

    Raises:
        UserError: see `Geometry.of`.
    """
    if cpu:
        config = padded_for_cpu(config, tp_size)
    names: dict[str, int] = {}
    tensor: list[int] = []
    corners: list[Ints] = []  # [rows, start or stop, dims]
    dims = 2 if decoder(config).delta_net is None else 3  # a convolution's weight has three
    rows: list[int] = []
    for rank in range(tp_size):
        geometry = Geometry.of(config, rank, tp_size, ep_size, format)
        before = len(tensor)
        outer = [part.box for p in geometry.outer_parameters() for part in p.parts]
        tensor += [names.setdefault(box.name, len(names)) for box in outer]
        corners.append(_corners(outer, dims))
        inner: dict[tuple[Layer, Layer], tuple[list[str], Ints]] = {}  # most layers are alike
        for number, pair in enumerate(geometry.layers):
            if pair not in inner:
                boxes = [part.box for p in geometry.layer_parameters(*pair) for part in p.parts]
                inner[pair] = [box.name for box in boxes], _corners(boxes, dims)
            inner_names, inner_corners = inner[pair]
            tensor += [names.setdefault(f"model.layers.{number}.{name}", len(names)) for name in inner_names]
            corners.append(inner_corners)
        rows.append(len(tensor) - before)
    start, stop = np.moveaxis(np.concatenate(corners), 1, 0)
    dtypes = [dtype if format is None else format.served_dtype_of(name, dtype) for name in names]
    codes = {name: code for code, name in enumerate(dict.fromkeys(dtypes))}
    return Holdings(
        names=tuple(names),
        tensor=np.array(tensor, dtype=np.int64),
        start=start,
        stop=stop,
        dtypes=tuple(codes),
        dtype=np.array([codes[name] for name in dtypes], dtype=np.int64)[tensor],
        holder=np.repeat(np.arange(tp_size), rows),
        holders=tuple(tuple(range(rank, n_servers * tp_size, tp_size)) for rank in range(tp_size)),
    )


def _corners(boxes: list[Box], dims: int) -> Ints:
    """`[boxes, start or stop, dims]`; a dimension that a tensor lacks is `[0, 1)`."""
    rows = [((*b.start, 0, 0)[:dims], (*b.stop, 1, 1)[:dims]) for b in boxes]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2, dims)
