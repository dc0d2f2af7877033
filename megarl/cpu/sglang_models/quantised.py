"""Quantised layers, experts and caches on CPU, where SGLang's own need AMX or a GPU: weights stay as they were loaded.

A product widens the weights, in the dtype of the activations. On GPUs SGLang quantises the activations too. A cache in
8 bits is SGLang's for GPUs, with scales of 1; `batched_decode.py` widens it.

Latent attention multiplies by rearranged copies of `kv_b_proj`. On GPUs SGLang makes them from the widened weight, in
bfloat16; here they have the dtype of the model. On CPUs it would round to one scale for the whole weight.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsWNA16,
    CompressedTensorsWNA16MoE,
    CompressedTensorsWNA16TritonMoE,
)
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.models.deepseek_common import deepseek_weight_loader
from torch import Tensor
from torch.nn.functional import linear

from megarl.families.weight_formats import WHOLE
from megarl.ops.quantize import unpacked, widened


class _NoCpu:
    """SGLang's platform for its choice of a cache: on CPU it takes E4M3 with AMX's own attention only."""

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)


def _as_loaded(method: Any, layer: Any) -> None:
    """No-op after loading."""


class WidenedExperts:
    """Weights `[experts, rows, columns]` and their scales, of which an expert's are widened when it is asked for.

    4-bit weights are packed, uint8 `[experts, rows, columns / 2]`.
    """

    def __init__(self, weights: Tensor, scales: Tensor, block: Sequence[int], dtype: torch.dtype) -> None:
        self.weights, self.scales, self.block, self.dtype = weights, scales, block, dtype

    def __getitem__(self, expert: int) -> Tensor:
        values = self.weights[expert]
        if values.dtype == torch.uint8:
            values = unpacked(values.view(torch.int32))
        return widened(values, self.scales[expert], self.block, self.dtype)


def _blocks(method: Fp8LinearMethod, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    block = method.quant_config.weight_block_size
    return linear(x, widened(layer.weight, layer.weight_scale_inv, block, x.dtype), bias)


def _experts(
    layer: Any, dispatch_output: Any, runner: Any, weights: str, scales: str, block: Sequence[int]
) -> StandardCombineInput:
    """Computes experts as SGLang does in 16 bits on a CPU without AMX (`UnquantizedFusedMoEMethod.forward_cpu`)."""
    x = dispatch_output.hidden_states
    of_layer = SimpleNamespace(num_experts=layer.num_experts)
    for name in ("w13_weight", "w2_weight"):
        held = getattr(layer, name + weights), getattr(layer, name + scales)
        setattr(of_layer, name, WidenedExperts(*held, block, x.dtype))
    return StandardCombineInput(hidden_states=moe_forward_native(of_layer, x, dispatch_output.topk_output, runner))


def _expert_blocks(method: Fp8MoEMethod, layer: Any, dispatch_output: Any) -> StandardCombineInput:
    block = method.quant_config.weight_block_size
    return _experts(layer, dispatch_output, method.moe_runner_config, "", "_scale_inv", block)


def _expert_groups(scheme: CompressedTensorsWNA16MoE, layer: Any, dispatch_output: Any) -> StandardCombineInput:
    block = (1, scheme.group_size)
    return _experts(layer, dispatch_output, scheme.moe_runner_config, "_packed", "_scale", block)


def _keep_config(scheme: CompressedTensorsWNA16MoE, layer: Any, moe_runner_config: Any) -> None:
    """Makes no runner: those for 4-bit experts are of GPUs."""
    scheme.moe_runner_config = moe_runner_config


_create_weights = Fp8LinearMethod.create_weights


def _create(method: Fp8LinearMethod, layer: Any, *args: Any, **kwargs: Any) -> None:
    _create_weights(method, layer, *args, **kwargs)
    layer.weight_scale_inv.wide_dtype = layer.orig_dtype


def _arranged(weight: Tensor, scales: Any, block: list[int]) -> tuple[Tensor, float]:
    """Stands in for `block_quant_to_tensor_quant`: the weight itself, and a scale of 1."""
    return widened(weight, scales, block, scales.wide_dtype), 1.0


def _channels(_: CompressedTensorsW8A8Fp8, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, widened(layer.weight, layer.weight_scale, (1, WHOLE), x.dtype), bias)


def _groups(scheme: CompressedTensorsWNA16, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    block = (1, scheme.group_size)
    return linear(x, widened(unpacked(layer.weight_packed), layer.weight_scale, block, x.dtype), bias)


def _dtypes(kind: type) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16, torch.float16]


def _is_supported(config: CompressedTensorsConfig, *_: Any, **__: Any) -> bool:
    return True


current_platform = kv_cache_configurator.current_platform
kv_cache_configurator.current_platform = _NoCpu()
Fp8LinearMethod.process_weights_after_loading = _as_loaded
Fp8LinearMethod.create_weights, Fp8LinearMethod.apply = _create, _blocks
Fp8MoEMethod.process_weights_after_loading, Fp8MoEMethod.apply = _as_loaded, _expert_blocks
deepseek_weight_loader.block_quant_to_tensor_quant = _arranged
CompressedTensorsW8A8Fp8.process_weights_after_loading = _as_loaded
CompressedTensorsW8A8Fp8.apply_weights = _channels
CompressedTensorsWNA16.process_weights_after_loading = _as_loaded
CompressedTensorsWNA16.apply_weights = _groups
# As on GPUs with moe_runner_backend=triton, which megarl's servers have.
CompressedTensorsWNA16MoE.process_weights_after_loading = CompressedTensorsWNA16TritonMoE.process_weights_after_loading
CompressedTensorsWNA16MoE.create_moe_runner = _keep_config
CompressedTensorsWNA16MoE.apply_weights = _expert_groups
CompressedTensorsConfig._check_scheme_supported = _is_supported
Fp8Config.get_supported_act_dtypes = classmethod(_dtypes)
CompressedTensorsConfig.get_supported_act_dtypes = classmethod(_dtypes)
