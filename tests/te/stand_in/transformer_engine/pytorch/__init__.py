"""The names of `transformer_engine.pytorch` that Megatron uses."""

from transformer_engine.pytorch import (  # noqa: F401
    attention,
    cpp_extensions,
    cpu_offload,
    distributed,
    fp8,
    module,
    ops,
    optimizers,
    permutation,
    tensor,
)
from transformer_engine.pytorch.attention import DotProductAttention  # noqa: F401
from transformer_engine.pytorch.fp8 import Fp8Padding, Fp8Unpadding, fp8_autocast, fp8_model_init  # noqa: F401
from transformer_engine.pytorch.module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm  # noqa: F401
