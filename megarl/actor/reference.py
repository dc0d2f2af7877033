"""The start policy: the reference of a KL penalty or of DPO."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.gpu.offload import Offloaded, drop_quantised_copies
from megarl.actor.weights import hf_weights
from megarl.parallel.config import ParallelConfig
from megarl.types import ROUTED_EXPERTS, PackedBatch


class MegatronReference(MegatronEngine):
    """The engine without gradients and optimizer. Its weights can be offloaded to the host between uses."""

    def __init__(self, config: EngineConfig, parallel: ParallelConfig | None = None) -> None:
        super().__init__(config, parallel, trainable=False)
        self._on_host: Offloaded | None = None
        self._on_device = True

    def compute_logp(self, data: Any) -> Tensor:
        """Computes log-probs, float32 `[total_tokens]`, token-aligned. Loads offloaded weights first.

        Tokens outside `loss_mask` are 0. Without a `loss_mask`, all tokens are computed.
        """
        self.onload()
        self.eval()
        return self.logprobs(data, trained_only=True)

    def offload(self) -> None:
        """Frees the device memory of the weights, which are copied to the host once: they never change."""
        if not self._on_device:
            return
        drop_quantised_copies(self.modules)
        if self._on_host is None:
            self._on_host = Offloaded(hf_weights.parameters(self.modules))
        else:
            self._on_host.free()
        self._on_device = False

    def onload(self) -> None:
        """Copies offloaded weights back to the device, bit for bit."""
        if self._on_host is not None and not self._on_device:
            self._on_host.restore()
            self._on_device = True


class BasePolicy:
    """The base of an engine with adapters, which are switched off for it. It takes no memory of its own."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine

    def compute_logp(self, data: Any) -> Tensor:
        """Computes log-probs as `MegatronReference.compute_logp` does, by the routers' own choice of experts."""
        batch = PackedBatch.from_padded(data)
        tokens = {key: value for key, value in batch.tokens.items() if key != ROUTED_EXPERTS}
        without_routes = PackedBatch(batch.cu_seqlens, tokens, batch.sequences, batch.bounds)
        without_routes.shared = batch.shared
        with self._engine.base_alone():
            return self._engine.eval().logprobs(without_routes, trained_only=True)

    def offload(self) -> None:
        """Does nothing: the weights are the engine's."""

    def destroy(self) -> None:
        """Does nothing: the engine frees its weights."""


def start_policy(
    config: EngineConfig, parallel: ParallelConfig, engine: MegatronEngine
) -> MegatronReference | BasePolicy:
    """Builds the start policy of a run whose engine is `engine`. With adapters it is their base."""
    if config.lora.rank:
        return BasePolicy(engine)
    reference = MegatronReference(config, parallel)
    reference.initialize()
    return reference
