"""Quantised linear layers and caches on CPU, where SGLang's own need AMX or a GPU: weights stay as they were loaded.

A product widens the weights, in the dtype of the activations. On GPUs SGLang quantises the activations too. A cache in
8 bits is SGLang's for GPUs, with scales of 1; `batched_decode.py` widens it.
"""

from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
from sglang.srt.mem_cache import kv_cache_configurator
from torch import Tensor
from torch.nn.functional import linear


class _NoCpu:
    """SGLang's platform for its choice of a cache: on CPU it takes E4M3 with AMX's own attention only."""

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)


def _as_loaded(method: Any, layer: Any) -> None:
    """No-op after loading."""


def _blocks(method: Fp8LinearMethod, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    rows, columns = method.quant_config.weight_block_size
    scales = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    size, width = layer.weight.shape
    return linear(x, (layer.weight.float() * scales[:size, :width]).to(x.dtype), bias)


def _channels(_: CompressedTensorsW8A8Fp8, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, (layer.weight.float() * layer.weight_scale).to(x.dtype), bias)


def _dtypes(kind: type) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16, torch.float16]


def _is_supported(config: CompressedTensorsConfig, *_: Any, **__: Any) -> bool:
    return True


current_platform = kv_cache_configurator.current_platform
kv_cache_configurator.current_platform = _NoCpu()
Fp8LinearMethod.process_weights_after_loading = _as_loaded
Fp8LinearMethod.apply = _blocks
CompressedTensorsW8A8Fp8.process_weights_after_loading = _as_loaded
CompressedTensorsW8A8Fp8.apply_weights = _channels
CompressedTensorsConfig._check_scheme_supported = _is_supported
Fp8Config.get_supported_act_dtypes = classmethod(_dtypes)
CompressedTensorsConfig.get_supported_act_dtypes = classmethod(_dtypes)
