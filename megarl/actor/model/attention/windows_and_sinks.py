"""Sliding windows and attention sinks for causal attention over packed sequences.

In a window of `n` tokens, a query sees itself and the `n - 1` tokens before it. A sink is a logit of each head, in the
softmax but without a value. So the weights of a query's keys sum to less than 1 (gpt-oss).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarl.knobs import UserError

SINK_COLUMNS = 8  # added to heads, of which two are used; a multiple of 8 keeps rows aligned for the kernels
CHUNK = 256  # queries at a time in a shorter window
CUDNN_WITH_SINKS = 91800  # first version with sinks over packed sequences (Transformer Engine's attention/utils.py)

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_in_window(attend: Attend, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Computes causal attention in a window, a chunk of queries at a time with the keys that it can see.

    Args:
        attend: attention `[num_seqs, heads, queries, dim]` under a mask, bool `[1, 1, queries, keys]`, or causal.
        query: `[num_seqs, heads, length, dim]`.
        key: `[num_seqs, kv_heads, length, dim]`.
        value: like key.
        window: keys that a query sees, itself included.
    """
    length, size, outputs = query.shape[2], max(window, CHUNK), []
    if length <= window:
        return attend(query, key, value, None)
    for first in range(0, length, size):
        last, low = min(first + size, length), max(0, first - window + 1)
        positions = torch.arange(low, last, device=query.device)
        mask = near(positions[first - low :], positions, window) & (positions <= positions[first - low :, None])
        parts = (query[:, :, first:last], key[:, :, low:last], value[:, :, low:last])
        outputs.append(attend(*parts, mask[None, None]))
    return torch.cat(outputs, dim=2)


def near(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """True for keys after the beginning of a query's window, bool `[..., queries, keys]`, by their positions."""
    return keys > queries[..., None] - window


def new_sinks(config: Any) -> torch.nn.Parameter:
    """Creates the sinks of a rank's heads `[heads / tp]`, without values.

    They bear Megatron's tensor-parallel mark. Without it, the gradient norm counts the sinks of one rank for all
    (Megatron-LM issue 7452), as it does for Megatron's own `softmax_offset`.
    """
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
    mark_sinks(sinks)
    return sinks


def mark_sinks(sinks: torch.nn.Parameter) -> None:
    """Sets Megatron's tensor-parallel mark: each rank holds the sinks of its own heads."""
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Computes attention `[num_seqs, heads, length, dim]` with sinks `[heads]` in the softmax. Differentiable.

    A key before all others stands for the sink: its value is zero, and its score is a further element of the query.
    Two columns hold this element, the second one what rounding takes from the first. Causal attention (`mask` None)
    gets a query before all others too, so that each query sees the sink and the keys up to its own.
    """
    (num_seqs, heads, _, dim), kv_heads = query.shape, key.shape[1]
    score = sinks.float() / scale
    rounded = score.to(query.dtype)
    columns = torch.stack((rounded, (score - rounded.float()).to(query.dtype)), dim=-1)
    columns = F.pad(columns, (0, SINK_COLUMNS - 2))[None, :, None].expand(num_seqs, heads, query.shape[2], -1)
    sink = key.new_zeros(num_seqs, kv_heads, 1, dim + SINK_COLUMNS)
    sink[..., dim : dim + 2] = 1.0
    query = torch.cat((query, columns), dim=-1)
    key = torch.cat((sink, F.pad(key, (0, SINK_COLUMNS))), dim=2)
    value = F.pad(value, (0, SINK_COLUMNS, 1, 0))
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=heads != kv_heads
    )
    return out[:, :, 1:, :dim] if mask is None else out[..., :dim]


def in_transformer_engine(attention: Any) -> Callable[..., torch.nn.Module]:
    """Returns a builder of Transformer Engine's attention with a layer's own window and sinks.

    Megatron has fields for both, but one window for all layers, and no tensor-parallel mark for the sinks. They come in
    float32 and get the dtype of the other parameters, as a model has one.

    Raises:
        UserError: cuDNN is too old for sinks over packed sequences.
    """

    def build(*, config: Any, window: int = 0, sinks: bool = False, **options: Any) -> torch.nn.Module:
        if sinks and (torch.backends.cudnn.version() or CUDNN_WITH_SINKS) < CUDNN_WITH_SINKS:
            raise UserError(
                f"actor.backend=te computes attention sinks over packed sequences from cuDNN {CUDNN_WITH_SINKS} on; "
                f"this one is {torch.backends.cudnn.version()}; update nvidia-cudnn, or set actor.backend=torch"
            )
        config = copy.copy(config)
        before_and_after = (window - 1, 0) if window else None  # keys beside the query's own
        fields = {"window_size": before_and_after, "window_attn_skip_freq": None}
        for name, value in (fields | {"softmax_type": "learnable" if sinks else "vanilla"}).items():
            setattr(config, name, value)
        module: torch.nn.Module = attention(config=config, **options)
        if isinstance(offset := getattr(module, "softmax_offset", None), torch.nn.Parameter):
            offset.data = offset.data.to(config.params_dtype)
            mark_sinks(offset)
        return module

    return build
