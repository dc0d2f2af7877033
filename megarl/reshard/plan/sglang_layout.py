"""Which part of the checkpoint each rank of an SGLang server holds, by rule: HF config -> parameters -> boxes.

The same rules plan a transfer before any server runs (`server_holdings`) and meet the live parameters of one
(`fragments`): where the two differ, the setup stops. They follow SGLang 0.5.23:

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from megarl.knobs import UserError
from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Ints

VOCAB_MULTIPLE = 64
CPU_NEURONS = 32
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIES_HEAD = ("qwen2", "qwen3", "llama", "mistral")  # with tied embeddings these have one parameter, the others two


@dataclass(frozen=True)
class Experts:
    """What the experts of a family are called."""

    block: str
    gate: str
    up: str
    down: str


FAMILIES: dict[str, Experts | None] = {
    "qwen2": None,
    "qwen3": None,
    "llama": None,
    "mistral": None,
    "qwen3_moe": Experts("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": Experts("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclass(frozen=True)
class Span:
    """What a rank's shard covers of one dimension: `size` entries from `start` on.

    Those from `total` on are padding, which belongs to no entry of the checkpoint.
    """

    start: int
    size: int
    total: int

    @property
    def stop(self) -> int:
        return min(self.start + self.size, self.total)


@dataclass(frozen=True)
class ParameterPart:
    """A box of the checkpoint, and where in a parameter it begins: `at` has the parameter's dimensions."""

    at: tuple[int, ...]
    box: Box

    def of(self, parameter: Tensor) -> Tensor:
        """The view of the parameter that holds the box."""
        lead = len(self.at) - len(self.box.start)
        part = parameter[self.at[:lead]]
        return part[tuple(slice(a, a + n) for a, n in zip(self.at[lead:], self.box.shape, strict=True))]


@dataclass(frozen=True)
class ServerParameter:
    """One parameter of SGLang's, as the rules have it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[ParameterPart, ...]


@dataclass(frozen=True)
class Geometry:
    """The sizes that decide what a tensor-parallel rank of SGLang holds. `padded_*` is what SGLang shards."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    attention_bias: bool
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
        """From a HF config, or that of a live SGLang model, which on CPU has padded it.

        Raises:
            UserError: an unknown family, or a size that the ranks do not divide.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise UserError(f"'{family}' models have no rule for live weight updates; known are {', '.join(FAMILIES)}")
        moe = FAMILIES[family] is not None
        neurons = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        padded_heads = config.num_attention_heads
        padded_kv_heads = config.num_key_value_heads or padded_heads
        heads = getattr(config, "original_num_attention_heads", padded_heads)
        geometry = Geometry(
            family=family,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "original_total_num_kv_heads", padded_kv_heads),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate=0 if moe else getattr(config, "original_intermediate_size", config.intermediate_size),
            vocab=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            attention_bias=bool(getattr(config, "attention_bias", False)),
            experts=(getattr(config, "num_experts", None) or config.num_local_experts) if moe else 0,
            expert_intermediate=getattr(config, f"original_{neurons}", getattr(config, neurons)) if moe else 0,
            padded_heads=padded_heads,
            padded_kv_heads=padded_kv_heads,
            padded_intermediate=0 if moe else config.intermediate_size,
            padded_expert_intermediate=getattr(config, neurons) if moe else 0,
            tp_rank=tp_rank,
            tp_size=tp_size,
            ep_size=ep_size,
        )
        geometry._check(config)
        return geometry

    def _check(self, config: Any) -> None:
        tp = self.tp_size
        if getattr(config, "mlp_only_layers", None) or (getattr(config, "decoder_sparse_step", None) or 1) != 1:
            raise UserError(f"a {self.family} model with dense layers has no rule for live weight updates")
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
        """Rows of q_proj, and columns of o_proj, on this rank: whole heads, in rank order."""
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
        padded = _up(self.vocab, VOCAB_MULTIPLE)
        if padded % self.tp_size:
            padded = _up(self.vocab, VOCAB_MULTIPLE * self.tp_size)
        size = padded // self.tp_size
        return Span(self.tp_rank * size, size, self.vocab)

    def outer_parameters(self) -> Iterator[ServerParameter]:
        """Parameters outside the layers."""
        hidden = _all(self.hidden)
        yield _stacked(EMBEDDING, [(EMBEDDING, self.vocab_span)], hidden)
        yield _stacked("model.norm.weight", [("model.norm.weight", hidden)])
        if not self.tied:
            yield _stacked(HEAD, [(HEAD, self.vocab_span)], hidden)
        elif self.family not in TIES_HEAD:
            yield _stacked(HEAD, [(EMBEDDING, self.vocab_span)], hidden)

    def layer_parameters(self) -> Iterator[ServerParameter]:
        """Parameters of one layer, all names without `model.layers.N.`; layers are alike."""
        hidden = _all(self.hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _stacked(f"{norm}.weight", [(f"{norm}.weight", hidden)])
        qkv = [("q_proj", self.q_span), ("k_proj", self.kv_span), ("v_proj", self.kv_span)]
        yield _stacked("self_attn.qkv_proj.weight", [(f"self_attn.{n}.weight", s) for n, s in qkv], hidden)
        if self.attention_bias or self.family == "qwen2":
            yield _stacked("self_attn.qkv_proj.bias", [(f"self_attn.{n}.bias", s) for n, s in qkv])
        if self.attention_bias and self.family not in ("qwen2", "mixtral"):
            yield _stacked("self_attn.o_proj.bias", [("self_attn.o_proj.bias", hidden)])
        yield _stacked("self_attn.o_proj.weight", [("self_attn.o_proj.weight", hidden)], self.q_span)
        if self.family.startswith("qwen3"):
            for norm in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                yield _stacked(norm, [(norm, _all(self.head_dim))])
        if (names := FAMILIES[self.family]) is not None:
            yield from self._experts(names)
        else:
            gate_up = [(f"mlp.{n}.weight", self.ffn_span) for n in ("gate_proj", "up_proj")]
            yield _stacked("mlp.gate_up_proj.weight", gate_up, hidden)
            yield _stacked("mlp.down_proj.weight", [("mlp.down_proj.weight", hidden)], self.ffn_span)

    def _experts(self, names: Experts) -> Iterator[ServerParameter]:
        router = f"{names.block}.gate.weight"
        yield _stacked(router, [(router, _all(self.experts))], _all(self.hidden))
        local = self.experts // self.ep_size
        first = self.tp_rank // (self.tp_size // self.ep_size) * local
        span, hidden = self.expert_span, _all(self.hidden)
        w13: list[ParameterPart] = []
        w2: list[ParameterPart] = []
        for slot in range(local):
            expert = f"{names.block}.experts.{first + slot}"
            gate_up = [(f"{expert}.{n}.weight", span) for n in (names.gate, names.up)]
            w13 += [ParameterPart((slot, *p.at), p.box) for p in _stacked("", gate_up, hidden).pieces]
            down = _stacked("", [(f"{expert}.{names.down}.weight", hidden)], span)
            w2 += [ParameterPart((slot, *p.at), p.box) for p in down.pieces]
        block = f"{names.block}.experts"
        yield ServerParameter(f"{block}.w13_weight", (local, 2 * span.size, self.hidden), tuple(w13))
        yield ServerParameter(f"{block}.w2_weight", (local, self.hidden, span.size), tuple(w2))

    def parameters(self) -> Iterator[ServerParameter]:
        """Every parameter of this rank."""
        yield from self.outer_parameters()
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for p in self.layer_parameters():
                pieces = (ParameterPart(q.at, Box(prefix + q.box.name, q.box.start, q.box.stop)) for q in p.pieces)
                yield ServerParameter(prefix + p.name, p.shape, tuple(pieces))


def _all(size: int) -> Span:
    return Span(0, size, size)


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _stacked(name: str, parts: list[tuple[str, Span]], *rest: Span) -> ServerParameter:
    """A parameter that stacks shards of the checkpoint tensors `parts` along its rows."""
    found, row = [], 0
    for tensor, span in parts:
        spans = (span, *rest)
        if all(s.start < s.stop for s in spans):  # else all of it is padding
            box = Box(tensor, tuple(s.start for s in spans), tuple(s.stop for s in spans))
            found.append(ParameterPart((row, *(0 for _ in rest)), box))
        row += span.size
    return ServerParameter(name, (row, *(s.size for s in rest)), tuple(found))


def padded_for_cpu(config: Any, tp_size: int) -> Any:
    """A copy of a HF config, changed as SGLang does on CPU before it builds the model."""
    config = copy.deepcopy(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    config.original_num_attention_heads, config.original_total_num_kv_heads = heads, kv_heads
    if heads % tp_size or kv_heads % tp_size:
        config.num_key_value_heads = _up(kv_heads, tp_size)
        config.num_attention_heads = config.num_key_value_heads * (heads // kv_heads)
    for name in ("moe_intermediate_size", "intermediate_size"):
        if (neurons := getattr(config, name, None)) and neurons % (tp_size * CPU_NEURONS):
            setattr(config, f"original_{name}", neurons)
            setattr(config, name, _up(neurons, tp_size * CPU_NEURONS))
    return config


def server_holdings(
    config: Any, *, tp_size: int, ep_size: int = 1, n_servers: int = 1, dtype: str = "bfloat16", cpu: bool = False
) -> Holdings:
    """What the ranks of `n_servers` equal servers hold, from a HF config alone; all tensors in one dtype.

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
        outer = [piece.box for p in geometry.outer_parameters() for piece in p.pieces]
        inner = [piece.box for p in geometry.layer_parameters() for piece in p.pieces]
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


class LayoutError(ValueError):
    """A live server does not hold what the rules say. `tensor` names its parameter."""

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


def fragments(parameters: Iterable[tuple[str, Tensor]], geometry: Geometry) -> Iterator[Fragment]:
    """Everything one rank of SGLang holds of the checkpoint, as views of its live parameters, in their order.

    Raises:
        LayoutError: the live names or shapes are not those of the rules: to guess would corrupt weights in silence.
    """
    rules = {p.name: p for p in geometry.parameters()}
    rank = f"rank {geometry.tp_rank} of {geometry.tp_size}"
    for name, parameter in parameters:
        rule = rules.pop(name, None)
        shape = list(parameter.shape)
        if rule is None:
            raise LayoutError(
                f"SGLang holds {name} {shape} on {rank}, and no rule for {geometry.family} names it: "
                "live weight updates would leave it stale",
                name,
            )
        if tuple(shape) != rule.shape:
            raise LayoutError(
                f"SGLang holds {name} as {shape} on {rank}, and the rules for {geometry.family} say {list(rule.shape)}",
                name,
            )
        for piece in rule.pieces:
            yield Fragment(geometry.tp_rank, name, piece.box, piece.of(parameter.detach()))
    for name, rule in rules.items():
        raise LayoutError(
            f"SGLang holds no {name} on {rank}, and the rules for {geometry.family} say {list(rule.shape)}", name
        )


REPACKED = {
    "use_intel_amx_backend": "packed for AMX",
    "w13_swiglu_interleaved": "interleaved; unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
    "load_up_proj_weight_first": "stacked up before gate; use --moe-runner-backend triton",
    "use_triton_kernels": "transposed; use --moe-runner-backend triton",
    "use_flashinfer_trtllm_moe": "in blocks; use --moe-runner-backend triton",
}


def check_plain(model: nn.Module) -> None:
    """Refuses a live model whose weights SGLang has rearranged after loading, even where the shapes stay.

    Raises:
        LayoutError: names the module, what was done to it, and the option that avoids it.
    """
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "quant_method", None)):
            for flag, done in REPACKED.items():
                if getattr(holder, flag, False) is True:
                    raise LayoutError(f"SGLang keeps the weights of {name} {done}: live updates need them plain", name)
        if getattr(getattr(module, "quant_method", None), "quant_config", None) is not None:
            raise LayoutError(f"SGLang serves {name} quantized: live updates need plain weights", name)
