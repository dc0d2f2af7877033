"""RMSNorm for the local layer spec: Megatron's `WrappedTorchNorm` refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of torch, with Megatron's mark for sequence parallelism.

    Under sequence parallelism each tp rank sees only its own tokens. Megatron sums the gradients of weights marked
    `sequence_parallel` over tp.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (torch does not declare it)
