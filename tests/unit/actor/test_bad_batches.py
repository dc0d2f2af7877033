"""Invalid batches are refused in one line, equally on every rank, and the engine trains on the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.actor.config import EngineConfig
from megarl.actor.supervised import MegatronLMEngine, lm_loss, trained_tokens
from megarl.knobs import UserError
from megarl.parallel import groups
from megarl.types import PackedBatch
from tests.unit.actor.memory_worker import batch

VOCAB, LONGEST = 343, 32


@pytest.fixture(scope="module")
def engine(checkpoints: Callable[..., Path]) -> Iterator[MegatronLMEngine]:
    folder = checkpoints("qwen3", tied=True, vocab_size=VOCAB)
    engine = MegatronLMEngine(EngineConfig(path=str(folder), max_tokens_per_mb=LONGEST))
    engine.initialize()
    yield engine
    groups.destroy()


def with_tokens(*ids: int) -> PackedBatch:
    data = batch(VOCAB, 2, 4)
    data["input_ids"][: len(ids)] = torch.tensor(ids)
    return data


def with_bounds(*bounds: int) -> PackedBatch:
    return PackedBatch(torch.tensor(bounds, dtype=torch.int32), batch(VOCAB, 2, 4).tokens)


def with_mask(*marked: int) -> PackedBatch:
    data = batch(VOCAB, 2, 4)
    mask = torch.zeros(8, dtype=torch.bool)
    mask[list(marked)] = True
    data["loss_mask"] = mask
    return data


def padded(**fields: Any) -> dict[str, torch.Tensor]:
    ones = torch.ones(2, 4, dtype=torch.bool)
    valid = {"input_ids": ones.long(), "attention_mask": ones, "loss_mask": ones}
    return {name: value for name, value in {**valid, **fields}.items() if value is not None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: batch(VOCAB, 0, 4), "the batch holds 0 sequences and no token; skip empty batches"),
        (lambda: batch(VOCAB, 2, 0), "the batch holds 2 sequences and no token"),
        (lambda: batch(VOCAB, 1, 33), "a sequence of 33 tokens does not fit into actor.max_tokens_per_mb=32"),
        (lambda: with_tokens(5, VOCAB), "input_ids holds token 343, outside the model's vocabulary 0 to 342; use"),
        (lambda: with_tokens(-100), "input_ids holds token -100, outside the model's vocabulary 0 to 342"),
        (lambda: with_bounds(1, 4, 8), "cu_seqlens is [1, 4, 8]...; it must rise from 0 to the number of tokens"),
        (lambda: with_bounds(0, 9, 8), "cu_seqlens is [0, 9, 8]...; it must rise from 0"),
        (lambda: with_mask(), "at least one token must be trained on"),
        (lambda: with_mask(0, 4), "at least one token must be trained on"),  # first tokens have no prediction
        (
            lambda: padded(input_ids=None),
            "a batch needs 'input_ids' [batch, length], got the keys ['attention_mask', 'loss_mask']",
        ),
        (lambda: padded(input_ids=torch.ones(8, dtype=torch.long)), "input_ids has shape (8,)"),
        (lambda: padded(attention_mask=torch.ones(2, 5)), "attention_mask has shape (2, 5), input_ids has (2, 4)"),
        (lambda: padded(attention_mask=torch.zeros(2, 4)), "and no token; skip empty batches"),
        (lambda: padded(loss_mask=torch.ones(3, 4)), "loss_mask"),
        (
            lambda: padded(loss_mask=None),
            "train_lm needs loss_mask, the batch has attention_mask, input_ids; loss_mask: ",
        ),
        (
            lambda: padded(attention_mask=None),
            "train_lm needs attention_mask, the batch has input_ids, loss_mask; attention_mask: pad_sequences_to",
        ),
        (
            lambda: padded(attention_mask=None, loss_mask=None),
            "train_lm needs attention_mask and loss_mask, the batch has input_ids; attention_mask: ",
        ),
        (
            lambda: PackedBatch(batch(VOCAB, 2, 4).cu_seqlens, {"input_ids": batch(VOCAB, 2, 4)["input_ids"]}),
            "train_lm needs loss_mask, the batch has input_ids; loss_mask: mark the tokens to train with 1",
        ),
    ],
)
def test_a_batch_that_cannot_be_trained_on_is_refused(
    make: Callable[[], Any], message: str, engine: MegatronLMEngine
) -> None:
    with pytest.raises(UserError) as refusal:
        engine.train_lm(make())
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_loss_without_its_mask_is_not_evaluated(engine: MegatronLMEngine) -> None:
    with pytest.raises(UserError, match="evaluate_lm needs loss_mask, the batch has attention_mask, input_ids"):
        engine.evaluate_lm(padded(loss_mask=None))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 0.0, -1.0])
def test_weights_of_microbatches_that_cannot_be_divided_by_are_refused(weight: float, engine: MegatronLMEngine) -> None:
    with pytest.raises(UserError, match=r"the batch's loss weights sum to"):
        engine.train_batch(batch(VOCAB, 2, 4), lm_loss, lambda data: weight, loss_input="logprobs")


def test_a_good_batch_trains_after_bad_ones(engine: MegatronLMEngine) -> None:
    with pytest.raises(UserError):
        engine.train_lm(with_tokens(VOCAB))
    assert engine.train_batch(batch(VOCAB, 2, 4), lm_loss, trained_tokens, loss_input="logprobs")["skipped_steps"] == 0
