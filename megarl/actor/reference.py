"""A frozen model beside the one that is trained: the reference of a KL penalty or of DPO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.weights import hf_weights
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig


class MegatronReference(MegatronEngine):
    """The engine without gradients and optimizer. Between uses its weights may wait on the host."""

    def __init__(self, config: EngineConfig, parallel: ParallelConfig | None = None) -> None:
        super().__init__(config, parallel, trainable=False)
        self._waiting: list[Tensor] = []

    def compute_logp(self, data: Any) -> Tensor:
        """float32 `[total_tokens]`, token-aligned: log-probs of the tokens that `loss_mask` marks (of all, where the
        batch has none); 0 elsewhere. Weights on the host are brought back first."""
        self.onload()
        self.eval()
        return self.logprobs(data, trained_only=True)

    @torch.no_grad()
    def offload(self) -> None:
        """Copies the weights to the host and frees the device's memory; nothing where they are there already."""
        if self._waiting:
            return
        for parameter in hf_weights.parameters(self.modules):
            host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=platform.has_gpu())
            self._waiting.append(host.copy_(parameter))
            parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def onload(self) -> None:
        """Brings the weights back, bit for bit."""
        for parameter, host in zip(hf_weights.parameters(self.modules), self._waiting, strict=False):
            parameter.untyped_storage().resize_(host.nbytes)
            parameter.copy_(host)
        self._waiting = []
