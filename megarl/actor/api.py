"""Interface of the training engine, with the names of AReaL's public API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.types import Metrics, PackedBatch, WeightUpdateMeta, WeightUpdates

LossFn = Callable[..., Tensor | tuple[Tensor, Metrics]]
LossWeightFn = Callable[[PackedBatch], Tensor | float]
WeightFormat = Literal["hf", "native"]


class LossSource(Protocol):
    """Computes a loss function's inputs itself, such as a student's divergence from its teacher."""

    def prepare(self, batch: PackedBatch, microbatches: Sequence[Any]) -> None:
        """Prepares the engine's microbatches of the global batch, before the pass over them. A collective."""

    def __call__(self, output: Tensor, microbatch: Any) -> tuple[Tensor, Tensor]:
        """Computes log-probs and entropies from the last stage's output, and may add keys to `microbatch.aligned`."""


LossInput = Literal["logits", "logprobs", "values"] | LossSource  # model output passed to a loss function


@dataclass(frozen=True)
class FinetuneSpec:
    """Length of a run, over which learning-rate schedules extend."""

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
    """One rank's part of a checkpoint, copied to the host. It can be written while training continues."""

    def write(self, folder: Path) -> list[Path]:
        """Writes this rank's files to `folder` and returns their paths. Not a collective."""


class TrainEngine(ABC):
    """One model on all trainer ranks (SPMD). Every rank calls every method.

    Batches are `PackedBatch`es, or padded `{key: [batch, length]}` mappings, which the engine packs. All ranks pass the
    same global batch, or each data parallel rank its own. Own batches are joined. The engine splits the batch over data
    parallel ranks and microbatches. Every rank gets the results of the sequences that it passed.
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of this rank."""

    @property
    @abstractmethod
    def data_parallel_rank(self) -> int:
        """Data parallel rank of this process, for data loaders that read a share of the data on each."""

    @property
    @abstractmethod
    def data_parallel_world_size(self) -> int:
        """Number of data parallel ranks."""

    @abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Joins the process groups, builds the model and loads its weights.

        Args:
            addr: unused, because torchrun's environment has the rendezvous address.
            ft_spec: length of the run, for the learning-rate schedule.
        """

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
            post_hook: takes logits `[tokens, vocab]` and the microbatch. Returns one value per token `[tokens, ...]` or
                per sequence `[num_seqs, ...]`. None returns the logits.
            aggregate: joins the list of per-sequence results, which are in the batch's order.
        """

    @abstractmethod
    def train_batch(
        self, data: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, loss_input: LossInput = "logits"
    ) -> dict[str, float]:
        """Takes one optimizer step over the global batch.

        `loss_fn` is called once per microbatch and returns the mean loss, or `(loss, metrics)`. Its arguments depend on
        `loss_input`. Sequences in them are complete on every layout.

        - `logits`: `loss_fn(logits, data)` with logits `[tokens, vocab]` and the token-aligned microbatch.
        - `logprobs`: `loss_fn(logprobs, entropy, data)`. Entry `i` of both and of every per-token tensor of `data`
          belongs to the same predicted token. Both are 0 outside the batch's `loss_mask`, if it has one. This needs far
          less memory than logits.
        - `values`: `loss_fn(values, data)`, see `critic.py`.
        - a `LossSource`: as `logprobs`, with keys that it adds to `data` (see `distillation.py`), or for a loss whose
          gradients are known token by token (see `token_loss.py`).

        Metrics are averaged with the microbatches' weights, a `TokenMean` over tokens. Metrics whose names end in
        `_max` take the maximum.

        Args:
            data: the global batch, or this data parallel rank's own.
            loss_fn: the mean loss of one microbatch, as above.
            loss_weight_fn: the weight of a microbatch's mean, such as its number of trained tokens. The step's loss is
                `sum(weight * loss) / sum(weight)` over all microbatches of all ranks.
            loss_input: the model output that `loss_fn` takes.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `skipped_steps` and the metrics, equal on every rank.
            `skipped_steps` is 1 if the loss or a gradient is not finite on any rank, otherwise 0. Then no rank takes
            the step, and parameters and optimizer stay unchanged.

        Raises:
            NonFiniteError: more than `actor.max_skipped_steps` steps in a row were skipped.
        """

    @abstractmethod
    def eval_batch(
        self, data: Any, loss_fn: LossFn, loss_weight_fn: LossWeightFn, loss_input: LossInput = "logits"
    ) -> dict[str, float]:
        """Computes the results of `train_batch` without gradients and without a step."""

    @abstractmethod
    def step_lr_scheduler(self) -> None:
        """Advances the learning-rate schedule by one step."""

    @abstractmethod
    def save(self, path: str | Path, weight_format: WeightFormat = "hf") -> None:
        """Writes a checkpoint to the folder `path`. A collective.

        Format `hf` has weights, config and tokenizer. Format `native` has the full training state (`save_state`).
        """

    @abstractmethod
    def load(self, path: str | Path, weight_format: WeightFormat = "hf") -> None:
        """Loads a checkpoint that `save` wrote. A collective.

        Format `hf` loads the weights only; optimizer moments and schedule stay unchanged. Format `native` loads the
        full training state (`load_state`).

        Raises:
            UserError: the folder does not fit the model.
        """

    @abstractmethod
    def connect(self, updates: WeightUpdates) -> None:
        """Sets the receiver of `upload_weights`."""

    @abstractmethod
    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Sends the current weights to the rollout servers, as `meta` says, through the connected receiver.

        Without a receiver, `type="disk"` writes a HF checkpoint to `meta.path`, for servers that load it themselves.
        A collective.

        Raises:
            UserError: `meta` has another type and `connect` was not called.
        """

    @abstractmethod
    def snapshot_state(self) -> StateSnapshot:
        """Copies the training state to the host: parameters, optimizer and schedule. A collective."""

    def save_state(self, folder: Path) -> None:
        """Writes a snapshot of the state to `folder`. Every rank returns once all have written. A collective."""
        self.snapshot_state().write(folder)
        if dist.is_initialized():
            dist.barrier()

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Restores a state that any layout of the same model wrote. A collective.

        Raises:
            UserError: the state has another model or dtype, or is incomplete.
        """
