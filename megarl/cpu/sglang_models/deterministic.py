"""Row-invariant operations (`ops/row_invariant.py`) in SGLang, for servers of a deterministic run.

SGLang imports every module of this package in its scheduler, before it builds the model. The trainer's own kernel then
computes the log-probs of sampled tokens, from the same logits. Ranks of a server add their products in the trainer's
order. Tokens are drawn by the seeds of their requests, as in SGLang's mode for GPUs.
"""

import functools
import logging
import os
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator, get_tp_group
from sglang.srt.layers import sampler
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe import fused_moe_native, topk
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from megarl.cpu.sglang_platform import DETERMINISTIC
from megarl.ops.row_invariant import (
    attention,
    linear,
    linear_of_summands,
    logprobs,
    murmur_hash,
    route,
    silu,
    sum_over_ranks,
)

log = logging.getLogger(__name__)
SUMMANDS = int(os.environ.get(DETERMINISTIC) or 0)


class RowInvariantBackend(TorchNativeAttnBackend):
    """Attention with bits that do not depend on the batch, in prefill and decode."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> torch.Tensor:
        """Attends from the new tokens of all sequences, one sequence at a time.

        `query`, `output` are `[num_tokens, heads, dim]`, the caches `[slots, kv_heads, dim]`; `req_pool_indices`,
        `seq_lens`, `extend_prefix_lens`, `extend_seq_lens` are `[num_seqs]`.
        """
        start = 0
        for slot, length, prefix, new in zip(
            req_pool_indices, seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            part, where = slice(start, start + new), req_to_token[slot, :length]
            keys, values = (cache[where].transpose(0, 1)[None] for cache in (k_cache, v_cache))
            visible = torch.arange(length) <= torch.arange(prefix, length)[:, None]
            attended = attention(query[part].transpose(0, 1)[None], keys, values, visible[None], scaling)
            output[part] = attended[0].transpose(0, 1)
            start += new
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> torch.Tensor:
        """Attends from the last token of each sequence; `query`, `output` are `[num_seqs, heads, dim]`."""
        visible = torch.arange(int(seq_lens.max())) < seq_lens[:, None]
        slots = req_to_token[req_pool_indices, : visible.shape[1]]
        # A stale slot may hold NaN, and 0 * NaN is NaN: the first token's slot stands in for it.
        slots = torch.where(visible, slots, slots[:, :1])
        keys, values = (cache[slots].transpose(1, 2) for cache in (k_cache, v_cache))
        output[:] = attention(query[:, :, None], keys, values, visible[:, None], scaling)[:, :, 0]
        return output


def _linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(layer, RowParallelLinear):
        return linear(x, layer.weight, bias)
    ranks = layer.input_size // layer.input_size_per_partition
    return linear_of_summands(x, layer.weight, bias, summands=SUMMANDS // ranks)


def _all_reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
    """Adds the ranks' tensors in pairs, into `input_`."""
    if self.world_size == 1:
        return input_
    return input_.copy_(sum_over_ranks(input_, self.device_group))


def _route(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = route(gating_output, topk, renormalize)
    return weights, ids.int()


def _experts(layer: Any, x: torch.Tensor, topk_output: Any, *_: Any) -> torch.Tensor:
    """Computes the experts' outputs `[tokens, hidden]` in the trainer's order: weight, project, add by ranks, by id.

    Ranks hold a part of each expert. SGLang adds their results later: the first one returns the sum, others zeros.
    """
    weights, ids, _ = topk_output
    ranks = layer.moe_tp_size
    outputs = x.new_zeros(*ids.shape, x.shape[-1])
    for expert in range(layer.num_experts):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
        inner = silu(gate) * up * weights[tokens, choices, None]
        outputs[tokens, choices] = linear_of_summands(inner, layer.w2_weight[expert], summands=SUMMANDS // ranks)
    if ranks > 1:
        outputs = sum_over_ranks(outputs, get_tp_group().device_group)
    total = outputs[:, 0]
    for choice in range(1, ids.shape[1]):
        total = total + outputs[:, choice]
    return total if layer.moe_tp_rank == 0 else torch.zeros_like(total)


def _silu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def _lm_head(self: Any, hidden_states: torch.Tensor, lm_head: Any, *_: Any, **__: Any) -> torch.Tensor:
    return linear(hidden_states, lm_head.weight)


_build_sampling = SamplingBatchInfo.from_schedule_batch.__func__


def _with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
    """Builds a batch's sampling parameters with the seeds of its requests, 42 for those without one."""
    info = _build_sampling(cls, batch, vocab_size)
    seeds = (request.sampling_params.sampling_seed for request in batch.reqs)
    info.sampling_seed = torch.tensor([42 if seed is None else seed for seed in seeds], dtype=torch.int64)
    return info


_sample = Sampler.forward


@functools.wraps(_sample)
def _sample_and_score(
    self: Any, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Samples by SGLang, then computes the sampled tokens' log-probs by the trainer's kernel."""
    logits = logits_output.next_token_logits.clone()  # sampling overwrites them
    sampled: torch.Tensor = _sample(self, logits_output, sampling_info, return_logprob, *args, **kwargs)
    if return_logprob:
        temperature = sampling_info.temperatures.flatten()
        logits_output.next_token_logprobs, _ = logprobs(logits, sampled.long(), temperature, logits.shape[1])
    return sampled


if SUMMANDS:
    from megarl.cpu.sglang_models import batched_decode  # noqa: F401  registers its backend first

    UnquantizedLinearMethod.apply = _linear
    GroupCoordinator.all_reduce = _all_reduce
    topk.fused_topk = topk.fused_topk_native = _route
    fused_moe_native.moe_forward_native = _experts
    SiluAndMul.forward = _silu_and_mul
    LogitsProcessor._compute_lm_head = _lm_head
    Sampler.forward = _sample_and_score
    SamplingBatchInfo.from_schedule_batch = classmethod(_with_seeds)
    sampler.murmur_hash32 = murmur_hash
    log.info("operations whose bits do not depend on the batch, for a deterministic run")

    @register_attention_backend("torch_native")  # in place of batched_decode's
    def create(runner: Any) -> RowInvariantBackend:
        """Builds the backend of a model runner."""
        return RowInvariantBackend(runner)
