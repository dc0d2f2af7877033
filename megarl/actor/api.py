"""The training engine's interface, with the names of AReaL's public API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.types import PackedBatch, WeightUpdateMeta, WeightUpdates

LossFn = Callable[..., Tensor | tuple[Tensor, dict[str, Tensor]]]
LossWeightFn = Callable[[PackedBatch], Tensor | float]
WeightFormat = Literal["hf", "native"]
LossInput = Literal["logits", "logprobs", "values"]  # what a loss function is given


@dataclass(frozen=True)
class FinetuneSpec:
    """How long a run is; learning-rate schedules are laid over it."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch


class StateSnapshot(Protocol):
    """What one rank adds to a checkpoint, held on the host: it may be written while training goes on."""

    def write(self, folder: Path) -> list[Path]:
        """Writes this rank's files to `folder`, without a collective, and returns them."""


class TrainEngine(ABC):
    """One model on all trainer ranks (SPMD): every method is called by every rank with the same global batch.

    Batches are `PackedBatch`es, or padded `{key: [batch, length]}` mappings, which are packed at the door. The engine
    shards them over data parallel ranks and microbatches itself, and every rank gets the same result.
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this rank computes."""

    @abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Joins the process groups, builds the model and loads its weights. `addr` is unused: torchrun's
        environment says where the world meets."""

    @abstractmethod
    def destroy(self) -> None:
        """Frees the model and leaves the process groups."""

    @abstractmethod
    def train(self, mode: bool = True) -> TrainEngine:
        """Sets training mode."""

    @abstractmethod
    def eval(self) -> TrainEngine:
        """Sets evaluation mode."""

    @abstractmethod
    def forward(
        self,
        data: Any,
        post_hook: Callable[[Tensor, PackedBatch], Tensor] | None = None,
        aggregate: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> Tensor:
        """Runs the model without gradients.

        Args:
            post_hook: takes logits `[tokens, vocab]` and the microbatch, returns one value a token `[tokens, ...]` or
                a sequence `[num_seqs, ...]`; None returns the logits.
            aggregate: joins the list of per-sequence results, given in the batch's order.
        """

    @abstractmethod
    def train_batch(
        self, data: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, loss_input: LossInput = "logits"
    ) -> dict[str, float]:
        """One optimizer step over the global batch.

        Args:
            loss_fn: the mean loss of one microbatch. With `loss_input="logits"` it is called as `loss_fn(logits, data)`:
                logits `[tokens, vocab]` and the token-aligned microbatch. With `loss_input="logprobs"` (far less memory)
                as `loss_fn(logprobs, entropy, data)`, where `logprobs[i]`, `entropy[i]` and every per-token tensor
                of `data` belong to the same predicted token; where the batch has a `loss_mask`, both are 0 outside it.
                With `loss_input="values"` (see `critic.py`) as `loss_fn(values, data)`. Sequences are whole on every
                layout. It may return `(loss, metrics)`; metrics are averaged with the same weights, names that end in
                `_max` take the maximum.
            loss_weight_fn: the weight of a microbatch's mean, such as its number of trained tokens. The step's loss is
                `sum(weight * loss) / sum(weight)` over all microbatches of all ranks.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `skipped_steps` and the metrics, equal on every rank. Where
            the loss or a gradient is not finite on any rank, no rank takes the step, parameters and optimizer are
            left as they were, and `skipped_steps` is 1, else 0.

        Raises:
            NonFiniteError: more than `actor.max_skipped_steps` in a row were skipped.
        """

    @abstractmethod
    def eval_batch(
        self, data: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, loss_input: LossInput = "logits"
    ) -> dict[str, float]:
        """`train_batch` without gradients and step."""

    @abstractmethod
    def step_lr_scheduler(self) -> None:
        """Advances the learning-rate schedule by one step."""

    @abstractmethod
    def save(self, path: str | Path, weight_format: WeightFormat = "hf") -> None:
        """Writes to the folder `path`: `hf` a checkpoint of weights, config and tokenizer, `native` everything that
        training goes on from (`save_state`). A collective."""

    @abstractmethod
    def load(self, path: str | Path, weight_format: WeightFormat = "hf") -> None:
        """Takes up what `save` wrote: `hf` the weights, optimizer moments and schedule staying as they are; `native`
        all (`load_state`). A collective.

        Raises:
            UserError: the folder does not fit the model.
        """

    @abstractmethod
    def connect(self, updates: WeightUpdates) -> None:
        """Says what `upload_weights` hands the weights to."""

    @abstractmethod
    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Brings the rollout servers to the present weights, as `meta` says, through what `connect` named. Without it,
        `type="disk"` writes a HF checkpoint to `meta.path`, for servers that load it themselves. A collective.

        Raises:
            UserError: another type, and nothing is connected.
        """

    @abstractmethod
    def snapshot_state(self) -> StateSnapshot:
        """Copies what training goes on from to the host: parameters, optimizer, schedule. A collective."""

    def save_state(self, folder: Path) -> None:
        """Writes a snapshot of the state to `folder`; every rank returns once all have written. A collective."""
        self.snapshot_state().write(folder)
        if dist.is_initialized():
            dist.barrier()

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Restores a state that this or any other layout of the same model wrote. A collective.

        Raises:
            UserError: the state is of another model or dtype, or not whole.
        """
