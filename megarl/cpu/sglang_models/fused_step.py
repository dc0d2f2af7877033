"""A generation step of a dense model on CPU in eight calls a layer, in place of SGLang's many small modules.

SGLang spends 1.5 ms of Python a layer and step, at every model size. Unsupported steps take SGLang's own
code: another dtype, tensor parallelism, a sliding window, scaled rotary embeddings, long prompts.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.model_executor.forward_context import get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from torch.nn.functional import linear

from megarl.cpu import decode
from megarl.cpu.sglang_models.several_steps import only_temperature
from megarl.cpu.sglang_platform import DETERMINISTIC, LONGEST_PROMPT

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FusedLayer:
    """The modules of a decoder layer that hold weights or settings. Weights are read from them at every step."""

    input_norm: Any
    qkv: Any
    q_norm: Any  # None if heads are not normed, like k_norm
    k_norm: Any
    rotary: Any
    attention: Any
    out: Any
    post_norm: Any
    gate_up: Any
    down: Any

    @staticmethod
    def of(layer: Any) -> FusedLayer:
        attention, mlp = layer.self_attn, layer.mlp
        return FusedLayer(
            layer.input_layernorm, attention.qkv_proj, getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None), attention.rotary_emb, attention.attn, attention.o_proj,
            layer.post_attention_layernorm, mlp.gate_up_proj, mlp.down_proj,
        )  # fmt: skip

    def is_plain(self) -> bool:
        """True if `__call__` computes the same as SGLang's modules."""
        kinds = (QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
        for module, kind in zip((self.qkv, self.out, self.gate_up, self.down), kinds, strict=True):
            if type(module) is not kind or type(module.quant_method) is not UnquantizedLinearMethod:
                return False
        rotary, attention = self.rotary, self.attention
        return (
            self.qkv.weight.dtype is torch.float32
            and type(rotary).forward_native is RotaryEmbedding.forward_native
            and rotary.is_neox_style
            and rotary.rotary_dim == rotary.head_size == attention.head_dim == attention.v_head_dim
            and attention.head_dim % decode.LANES == 0
            and attention.logit_cap == 0
            and attention.sliding_window_size == -1
        )

    def __call__(self, residual: Tensor, update: Tensor | None, step: StepInputs) -> Tensor:
        """Returns the layer's update of `residual` `[rows, hidden]`; adds `update`, the previous layer's, first."""
        keys, values = step.cache.get_kv_buffer(self.attention.layer_id)
        x = decode.add_rms_norm(residual, update, self.input_norm.weight, self.input_norm.variance_epsilon)
        qkv = linear(x, self.qkv.weight, self.qkv.bias)
        normed = self.q_norm is not None
        queries = decode.rotate_and_store(
            qkv, keys, values, step.slots, step.positions, self.rotary.cos_sin_cache,
            q_norm=self.q_norm.weight if normed else None, k_norm=self.k_norm.weight if normed else None,
            eps=self.q_norm.variance_epsilon if normed else 0.0,
        )  # fmt: skip
        attended = decode.paged_attention(
            queries, keys, values, step.table, step.requests, step.positions, self.attention.scaling
        )
        x = linear(attended.flatten(1), self.out.weight, self.out.bias)
        x = decode.add_rms_norm(residual, x, self.post_norm.weight, self.post_norm.variance_epsilon)
        x = decode.silu_mul(linear(x, self.gate_up.weight, self.gate_up.bias))
        return linear(x, self.down.weight, self.down.bias)


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step that all layers share."""

    cache: Any  # SGLang's pool of keys and values
    table: Tensor  # int32 [num_requests, max_tokens]: the slot of each token
    slots: Tensor  # int64 [rows], as the next two: cache slots of the new tokens
    requests: Tensor
    positions: Tensor


class FusedStep:
    """Mixin before one of SGLang's dense models that runs its layers in a few calls each, where supported."""

    fused_layers: list[FusedLayer] | None = None  # []: SGLang's own code must run

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Has the arguments and results of SGLang's `forward`."""
        model: Any = self
        if self.fused_layers is None:
            self.fused_layers = _plain_layers(model)
        if not self.fused_layers or get_embedding or input_embeds is not None or not _is_short(forward_batch):
            return super().forward(  # type: ignore[misc]
                input_ids, positions, forward_batch, input_embeds, get_embedding, pp_proxy_tensors
            )
        requests = forward_batch.req_pool_indices
        if not forward_batch.forward_mode.is_decode():
            requests = requests.repeat_interleave(forward_batch.extend_seq_lens)
        step = StepInputs(
            get_token_to_kv_pool(), get_req_to_token_pool().req_to_token, forward_batch.out_cache_loc.long(),
            requests.long(), positions.long(),
        )  # fmt: skip
        residual = model.model.embed_tokens.weight[input_ids]
        update = None
        for layer in self.fused_layers:
            update = layer(residual, update, step)
        norm = model.model.norm
        hidden = decode.add_rms_norm(residual, update, norm.weight, norm.variance_epsilon)
        return model.logits_processor(input_ids, hidden, model.lm_head, forward_batch)


def _plain_layers(model: Any) -> list[FusedLayer]:
    """Layers of `model`; [] if any of them is unsupported."""
    single_rank = get_parallel().tp_size == 1 and get_parallel().pp_size == 1
    if os.environ.get(DETERMINISTIC) or not single_rank or model.capture_aux_hidden_states:
        return []
    cache = get_token_to_kv_pool()
    layers = [FusedLayer.of(layer) for layer in model.model.layers]
    supported = all(layer.is_plain() for layer in layers)
    if not supported or {b.dtype for b in cache.get_kv_buffer(layers[0].attention.layer_id)} != {torch.float32}:
        return []
    log.info("generation steps in a few calls a layer")
    return layers


def _is_short(batch: Any) -> bool:
    mode = batch.forward_mode
    if mode.is_decode():
        return bool(len(batch.input_ids) == len(batch.req_pool_indices) > 0)
    if not mode.is_extend_without_speculative() or batch.input_ids.numel() != sum(batch.extend_seq_lens_cpu):
        return False
    return bool(0 < max(batch.extend_seq_lens_cpu) <= LONGEST_PROMPT)


class FusedSampler(Sampler):
    """SGLang's sampler, in one call if only the temperature shapes the distribution."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int] | None,
        token_ids_logprobs: list[Any] | None,
        positions: Tensor,
        *,
        logprob_logits: Tensor | None = None,
    ) -> Tensor:
        """Has the arguments and results of SGLang's `forward`."""
        info, logits = sampling_info, logits_output.next_token_logits
        plain = only_temperature(info, top_logprobs_nums, token_ids_logprobs) and logprob_logits is None
        if not plain or logits.dtype is not torch.float32:
            return super().forward(
                logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions,
                logprob_logits=logprob_logits,
            )  # fmt: skip
        logits = self._preprocess_logits(logits, info)
        uniform = torch.rand(len(logits), dtype=torch.float64)
        tokens, logprobs = decode.sample(logits.contiguous(), info.temperatures.flatten(), uniform)
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        return tokens


if not os.environ.get(DETERMINISTIC):  # its samples are SGLang's own, scored in `deterministic.py`
    register_sampler_backend("pytorch", FusedSampler)
