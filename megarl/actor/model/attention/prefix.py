"""Attention over shared prompts by flash attention, beside Transformer Engine's modules.

The tokens of a microbatch form segments: shared prompts, the branches that continue them, and branches of these. A
token attends to its own segment by causal attention, and to all segments before it by a second call without a mask.
Both calls return the log-sum-exp of their scores, and by it the outputs are merged into that of one softmax. Given the
merged output and log-sum-exp, the backward kernel of each call computes the gradients of its own keys and values, and
its part of the queries' gradient. Ring attention works alike (Liu et al. 2023), so nothing is approximated.

The kernels are torch's own: 16 bits, GPUs of compute capability 8.0 or newer, heads of at most 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.actor.batch.context_parallel import Cut, LocalTokens
from megarl.actor.batch.shared_prefix import Segment, SharedTokens
from megarl.actor.model.attention.packed import WHOLE, pack_with_bounds
from megarl.ops.first_derivative import first_derivative_only
from megarl.types import cu_seqlens_of

HEAD_DIM_MULTIPLE = 8  # of the kernels (flash_api.cpp); other heads are padded with zeros


@dataclass(frozen=True)
class Bounds:
    """Parts of the queries, each with the part of the keys that it attends to."""

    queries: Tensor  # int32 [parts + 1]: bounds of the parts
    keys: Tensor  # int32 [parts + 1]
    longest_query: int
    longest_key: int
    causal: bool

    @staticmethod
    def of(queries: Tensor, keys: Tensor, causal: bool) -> Bounds:
        """Computes the bounds of parts of lengths `[parts]`."""
        query_bounds, key_bounds = cu_seqlens_of(queries), cu_seqlens_of(keys)
        # If the longest is 1, the kernel takes another path, which regroups the heads (flash_api.cpp).
        return Bounds(query_bounds, key_bounds, max(2, int(queries.max())), int(keys.max()), causal)


@dataclass(kw_only=True)
class PackedSegments(PackedSeqParams):
    """A packed microbatch as segments, some of which continue others.

    For Megatron's rotary code it is one sequence, with an angle for each token.
    """

    positions: Tensor  # int64 [tokens]: position of each token in its sequence
    own: Bounds  # each segment attends to itself
    earlier: Bounds  # the children of a segment attend to it and its ancestors
    children: slice  # tokens of all segments that have a parent
    ancestors: slice | Tensor  # tokens that are the keys of `earlier`: a slice, or int64 indices


def pack_segments(
    cu_seqlens: Tensor, device: torch.device, cut: Cut = WHOLE, shared: LocalTokens | None = None
) -> PackedSeqParams:
    """Plans attention over packed sequences: by their bounds, or by segments if some continue others.

    See `pack_in_blocks` for the arguments. `shared` is from `share_in_segments`.
    """
    if not isinstance(shared, SharedTokens):
        return pack_with_bounds(cu_seqlens, device, cut)
    lengths = torch.tensor([s.length for s in shared.segments])
    if all(s.parent < 0 for s in shared.segments):  # each is a sequence
        return pack_with_bounds(cu_seqlens_of(lengths), device, cut)
    starts = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff().long())
    positions = shared.source - starts[shared.source]
    total = int(lengths.sum())
    whole = torch.tensor([0, total], dtype=torch.int32)
    earlier, children, ancestors = _attention_to_ancestors(shared.segments, lengths)
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=total,
        max_seqlen_kv=total,
        positions=positions,
        own=Bounds.of(lengths, lengths, causal=True),
        earlier=earlier,
        children=children,
        ancestors=ancestors,
    )


def _attention_to_ancestors(segments: list[Segment], lengths: Tensor) -> tuple[Bounds, slice, slice | Tensor]:
    """Plans the second call: its bounds, its queries' tokens, and its keys' tokens.

    If only whole prompts are shared, the keys are the first tokens of the microbatch, and nothing is gathered.
    """
    ends = lengths.cumsum(0)
    places = [i for i, segment in enumerate(segments) if segment.parent >= 0]  # adjacent, by parent
    parents, owner = torch.tensor([segments[i].parent for i in places]).unique_consecutive(return_inverse=True)
    query_lengths = torch.zeros(len(parents), dtype=torch.long).index_add_(0, owner, lengths[places])
    children = slice(int(ends[places[0]] - lengths[places[0]]), int(ends[places[-1]]))
    lines = [_line(segments, parent) for parent in parents.tolist()]
    key_lengths = torch.stack([lengths[line].sum() for line in lines])
    bounds = Bounds.of(query_lengths, key_lengths, causal=False)
    if all(len(line) == 1 for line in lines):
        return bounds, children, slice(0, int(key_lengths.sum()))
    keys = [torch.arange(int(ends[i] - lengths[i]), int(ends[i])) for line in lines for i in line]
    return bounds, children, torch.cat(keys)


def _line(segments: list[Segment], index: int) -> list[int]:
    """Lists a segment and its ancestors, the oldest first."""
    line = [index]
    while (parent := segments[line[-1]].parent) >= 0:
        line.append(parent)
    return line[::-1]


def with_shared_prompts(attention: Any) -> Any:
    """Extends a class of attention by `PackedSegments`. All other microbatches go to the class itself."""

    class SharedPromptAttention(attention):
        def __init__(self, config: Any, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
            super().__init__(config, *args, softmax_scale=softmax_scale, **kwargs)
            self.segments_scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
        ) -> Tensor:
            if isinstance(packed_seq_params, PackedSegments):
                return attend(query, key, value, packed_seq_params, self.segments_scale)
            result: Tensor = super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
            return result

    return SharedPromptAttention


def attend(query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, scale: float) -> Tensor:
    """Computes `[tokens, heads * dim]` of query `[tokens, heads, dim]`, key and value `[tokens, kv_heads, dim]`."""
    dim = query.shape[-1]
    if dim % HEAD_DIM_MULTIPLE:
        query, key, value = (F.pad(x, (0, -dim % HEAD_DIM_MULTIPLE)) for x in (query, key, value))
    out: Tensor = _SegmentAttention.apply(query, key, value, packed, scale)
    return out[..., :dim].reshape(out.shape[0], -1)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSegments, scale: float) -> Tensor:
        children, ancestors = packed.children, packed.ancestors
        out, lse, *unused = _flash(query, key, value, packed.own, scale)
        more, more_lse, *_ = _flash(query[children], key[ancestors], value[ancestors], packed.earlier, scale)
        part, part_lse = out[children], lse[:, children]  # views
        weight = torch.sigmoid(more_lse - part_lse).t()[..., None]
        part.copy_(torch.lerp(part.float(), more.float(), weight))
        part_lse.copy_(torch.logaddexp(part_lse, more_lse))
        ctx.save_for_backward(query, key, value, out, lse, *unused[:2])
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    @first_derivative_only("attention over shared prompts", "actor.shared_prefix=false")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *unused = ctx.saved_tensors
        packed, grad = ctx.packed, grad.contiguous()
        children, ancestors = packed.children, packed.ancestors
        grads = _flash_backward(grad, query, key, value, out, lse, packed.own, unused, ctx.scale)
        more = _flash_backward(
            grad[children],
            query[children],
            key[ancestors],
            value[ancestors],
            out[children],
            lse[:, children].contiguous(),
            packed.earlier,
            unused,
            ctx.scale,
        )
        grads[0][children] += more[0]
        for total, part in zip(grads[1:], more[1:], strict=True):
            if isinstance(ancestors, slice):
                total[ancestors] += part
            else:  # a token may be in several lines: summed in float32
                total.copy_(total.float().index_add_(0, ancestors, part.float()))
        return *grads, None, None


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float) -> tuple[Tensor, ...]:
    """Computes the output, its log-sum-exp float32 `[heads, tokens]`, and the state of a dropout that is not used."""
    result: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        bounds.longest_query,
        bounds.longest_key,
        0.0,
        bounds.causal,
        False,
        scale=scale,
    )
    return result[:4]


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Bounds,
    unused: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of query, key and value, from the output and log-sum-exp over all keys of the queries."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        bounds.queries,
        bounds.keys,
        bounds.longest_query,
        bounds.longest_key,
        0.0,
        bounds.causal,
        *unused,
        scale=scale,
    )
    return result
