"""Updates in several minibatches: each sequence once, and the figures of the steps that were taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.supervised import trained_tokens
from megarl.algorithms import GRPO, GRPOConfig
from megarl.types import PackedBatch, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")

LENGTHS = torch.tensor([4, 7, 5, 6, 3, 8, 4, 5, 6])
SKIPPED = float("inf")


class Marked(GRPO):
    """Notes the sequences of each step. Every step's metrics are its mark; a step marked SKIPPED has no finite loss."""

    def __init__(self, marks: list[float]) -> None:
        super().__init__(GRPOConfig(n_minibatches=len(marks)))
        self.marks = iter(marks)
        self.steps: list[list[int]] = []

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        self.steps.append(sorted(set(data["row"][data["loss_mask"].bool()].tolist())))
        mark = torch.tensor(next(self.marks))
        shown = {"mark": mark.clamp(max=100), "mark_max": mark.clamp(max=100)}
        return logprobs.sum() * (mark if mark == SKIPPED else 1.0), shown


def batch_of() -> PackedBatch:
    ids = torch.randint(0, 343, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(0))
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS)
    return PackedBatch(
        cu_seqlens_of(LENGTHS),
        {"input_ids": ids, "loss_mask": torch.ones_like(ids).bool(), "prox_logp": torch.zeros(len(ids)), "row": row},
    )


@pytest.fixture(scope="module")
def actor(checkpoints: Callable[..., Path]) -> MegatronPPOActor:
    folder = checkpoints("qwen3", tied=True, vocab_size=343)
    config = EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-4), max_skipped_steps=5)
    actor = MegatronPPOActor(config, GRPO(GRPOConfig()))
    actor.initialize()
    return actor


def update(actor: MegatronPPOActor, marks: list[float]) -> tuple[dict[str, float], list[list[int]]]:
    algorithm: Any = Marked(marks)
    actor.algorithm = algorithm
    return actor.ppo_update(batch_of()), algorithm.steps


def test_every_sequence_is_in_one_minibatch_and_they_spread_over_the_batch(actor: MegatronPPOActor) -> None:
    _, steps = update(actor, [1.0, 1.0])
    assert steps == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    _, steps = update(actor, [1.0] * 4)
    assert steps == [[0, 4, 8], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("marks", "mean", "largest", "skipped"),
    [
        ([1.0, 3.0, 8.0], 4.0, 8.0, 0),
        ([1.0, SKIPPED, 4.0], 2.5, 4.0, 1),
        ([SKIPPED, 3.0, SKIPPED], 3.0, 3.0, 2),
        ([SKIPPED, SKIPPED], 100.0, 100.0, 2),
    ],
)
def test_figures_are_of_the_steps_that_were_taken(
    actor: MegatronPPOActor, marks: list[float], mean: float, largest: float, skipped: int
) -> None:
    stats, _ = update(actor, marks)
    assert (stats["mark"], stats["mark_max"], stats["skipped_steps"]) == (pytest.approx(mean), largest, skipped)


def test_fewer_sequences_than_minibatches_are_refused(actor: MegatronPPOActor) -> None:
    with pytest.raises(ValueError, match=r"9 samples are too few for algorithm\.n_minibatches=10"):
        update(actor, [1.0] * 10)


def test_first_tokens_have_no_prediction_and_no_weight() -> None:
    batch = batch_of()
    assert int(trained_tokens(batch)) == int(LENGTHS.sum()) - len(LENGTHS)
    assert batch["loss_mask"].all()
