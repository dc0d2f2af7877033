"""Trains layers of multi-token prediction beside the model, which they do not change.

The model's hidden states, embedding and head enter their loss as constants, and their parameters have buffers, an
optimizer shard and a gradient norm of their own. So log-probs, losses and weights of the model are equal bit for bit
to a run without them. Training keeps them able to draft what the policy says.

The gradient of a token's log-prob is a constant. So a head in chunks takes it at once, and computes logits once
(`ops/known_gradients.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from megarl.actor import data_parallel
from megarl.actor.batch.microbatch import FutureTokens, Microbatch, future_targets
from megarl.actor.model import heads
from megarl.actor.model.backends import LayerBackend
from megarl.actor.model.mtp import MtpLayers, embed
from megarl.families import decoder
from megarl.parallel.groups import Groups
from megarl.types import PackedBatch


class MtpTraining:
    """Loss of the layers of multi-token prediction, and the model's weights that they read."""

    def __init__(
        self,
        model: PretrainedConfig,
        groups: Groups,
        backend: LayerBackend,
        modules: Sequence[Any],
        head: heads.HeadSettings,
        factor: float,
    ) -> None:
        """Takes this rank's modules: the model's stages, then `MtpLayers` on ranks with the last stage.

        The optimizer steps by `factor` times the loss.
        """
        self.groups, self.backend, self.factor = groups, backend, factor
        # Drafts are judged by the policy's own distribution, without the sampling temperature.
        self._head = dataclasses.replace(head, temperature=1.0)
        self.depths, self.vocab = len(decoder(model).mtp), model.vocab_size
        self._first, self._last = modules[0], modules[groups.vpp_size - 1]
        self._layers: MtpLayers | None = modules[groups.vpp_size] if groups.is_last_stage else None
        self._received: Tensor | None = None  # the embedding's rows, if the last stage has none

    def targets(
        self, batch: PackedBatch, rows: Sequence[Sequence[list[int]]], weights: Sequence[Sequence[float]]
    ) -> list[int]:
        """Counts each depth's labels in the whole batch, of the microbatches `rows` that have a weight."""
        pairs = zip(itertools.chain(*rows), itertools.chain(*weights), strict=True)
        used = batch.select([index for part, weight in pairs if weight for index in part])
        return [future_targets(used, depth + 1) for depth in range(self.depths)]

    def refresh(self, ddps: Sequence[Any]) -> None:
        """Copies the embedding to the last stage, if it is on the first one alone. A collective of these two."""
        groups = self.groups
        if groups.pp_size == 1 or self._last.share_embeddings_and_output_weights:
            return
        source = dist.get_process_group_ranks(groups.pp)[0]
        if groups.rank == source:
            weight = self._first.embedding.word_embeddings.weight
            data_parallel.await_parameter(ddps, weight)
            dist.broadcast(weight.detach(), source, group=groups.collection.embd)
        elif groups.is_last_stage:
            if self._received is None:
                self._received = torch.empty_like(heads.weight_of(self._last), requires_grad=False)
            dist.broadcast(self._received, source, group=groups.collection.embd)

    def loss(self, output: Tensor, mb: Microbatch) -> Tensor:
        """Computes this microbatch's part of the loss, from the model's output.

        The batch's loss is the mean over depths of the mean negative log-prob (nats per token) of trained tokens
        (DeepSeek-V3, eq. 24 and 25, without the factor).
        """
        assert self._layers is not None, "the last stage has the layers"
        rotary = self._last.rotary_pos_emb
        angles = rotary(rotary.get_rotary_seq_len(None, None, None, None, mb.packed), packed_seq=True)
        embedded = [embed(self._embedding(), depth.ids, self.groups) for depth in mb.future]
        outputs = self._layers(output.detach(), embedded, angles, mb.packed)
        if mb.weight == 0:  # every parameter needs a gradient all the same
            return torch.stack([hidden.sum() * 0.0 for hidden in outputs]).sum()
        losses = [self._depth_loss(hidden, depth, mb) for hidden, depth in zip(outputs, mb.future, strict=True)]
        return torch.stack(losses).mean()

    def _depth_loss(self, output: Tensor, depth: FutureTokens, mb: Microbatch) -> Tensor:
        hidden = heads.hidden_states(output, self._last, self.groups)
        logprobs, _ = self.backend.logprobs(
            hidden,
            depth.labels,
            heads.weight_of(self._last).detach(),
            self.groups,
            self.vocab,
            self._head,
            False,
            functools.partial(self._gradients, depth),
        )
        return -mb.gather(logprobs, self.groups.cp).sum() / max(depth.targets, 1)

    def _gradients(self, depth: FutureTokens, logprobs: Tensor, _: Tensor | None, rows: Tensor) -> tuple[Tensor, ...]:
        """Computes the gradients of a chunk's log-probs, step by step as backward does: the same bits."""
        mean = torch.full_like(logprobs, self.factor) / self.depths
        return (-(mean / max(depth.targets, 1)),)

    def _embedding(self) -> Tensor:
        """Rows of the embedding on this tensor-parallel rank."""
        if self._received is not None:
            return self._received
        if self._last.share_embeddings_and_output_weights:
            return heads.weight_of(self._last).detach()
        weight: Tensor = self._last.embedding.word_embeddings.weight
        return weight.detach()
