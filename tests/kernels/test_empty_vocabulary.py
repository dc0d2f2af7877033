"""Log-probs under a vocabulary without entries are refused; they would be 0 for every label."""

from __future__ import annotations

import pytest
import torch

from megarl.ops.logprob import (
    gather_logprobs,
    gather_logprobs_entropy,
    linear_logprobs,
    linear_token_loss,
    vocab_parallel_logprobs,
)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("label", [-1, 0])
def test_an_empty_vocabulary_is_refused(rows: int, label: int) -> None:
    logits, hidden, weight, labels = (
        torch.zeros(rows, 0), torch.zeros(rows, 4), torch.zeros(0, 4), torch.full((rows,), label)
    )  # fmt: skip
    gathered = "logits must have the labels' shape and then the vocabulary, of at least one entry"
    columns = "logits have shape .*, expected at least one column of the vocabulary"
    weight_rows = "weight has shape .*, expected at least one row of the vocabulary"
    calls = (
        (lambda: gather_logprobs(logits, labels), gathered),
        (lambda: gather_logprobs_entropy(logits, labels), gathered),
        (lambda: vocab_parallel_logprobs(logits, labels, vocab_valid=0), columns),
        (lambda: linear_logprobs(hidden, weight, labels, vocab_valid=0), weight_rows),
        (
            lambda: linear_token_loss(hidden, weight, labels, lambda logprobs, rows: logprobs, vocab_valid=0),
            weight_rows,
        ),
    )
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_shard_without_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits have shape \(2, 0\), expected at least one column of the vocabulary"):
        vocab_parallel_logprobs(torch.zeros(2, 0), torch.full((2,), -1), vocab_valid=3)
