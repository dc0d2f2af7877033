"""RMSNorm for the local layer spec: Megatron's `WrappedTorchNorm` refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of torch, with Megatron's mark for sequence parallelism. May multiply by 1 + weight.

    Under sequence parallelism each tp rank sees only its own tokens. Megatron sums the gradients of weights marked
    `sequence_parallel` over tp. A zero-centered weight is stored as in the checkpoint, without the 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (torch does not declare it)
        self.zero_centered = config.layernorm_zero_centered_gamma

    def gain(self) -> Tensor:
        """Factor of each feature: the weight, or 1 + a zero-centered one in float32."""
        return 1.0 + self.weight.float() if self.zero_centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x `[..., hidden]`. A zero-centered norm computes in float32, as transformers does."""
        if not self.zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.gain(), self.eps).to(x.dtype)
