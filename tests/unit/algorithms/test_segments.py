"""Conversations cut into segments: advantages, loss and minibatches are those of the whole ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_rl import LENGTHS, PROMPTS, RL_NAMES, make_batch
from torch import Tensor

from megarl.actor.policy import MegatronPPOActor, update_in_minibatches
from megarl.algorithms import ALGORITHMS, algorithm_of
from megarl.algorithms.base import sample_cu_seqlens
from megarl.types import PackedBatch, cu_seqlens_of, trained_tokens_of_samples

CONTEXT = 3  # tokens of the rewritten history before a segment's own
CUTS = {0: [4], 3: [3, 5], 4: [5, 6, 8], 7: [4, 7]}  # sample -> where its further segments begin


def cut(batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """The batch with the samples of CUTS in segments, and the position in it of each token of `batch`."""
    lengths, sample_ids, source, place = [], [], [], []
    total = 0
    for sample, (start, length) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), LENGTHS, strict=True)):
        bounds = [0, *CUTS.get(sample, []), length]
        for first, (begin, end) in enumerate(itertools.pairwise(bounds)):
            context = CONTEXT if first else 0
            place += range(total + context, total + context + end - begin)
            source += [-1] * context + list(range(start + begin, start + end))
            lengths.append(context + end - begin)
            sample_ids.append(sample)
            total += lengths[-1]
    index = torch.tensor(source)
    tokens = {key: torch.where(index >= 0, value[index.clamp(min=0)], 0) for key, value in batch.tokens.items()}
    tokens["loss_mask"] = tokens["loss_mask"].bool()
    tokens["values"] = torch.where(index >= 0, tokens["values"], 9.0)  # nobody reads those of given tokens
    sequences = {key: value[sample_ids] for key, value in batch.sequences.items()}
    sequences["sample_ids"] = torch.tensor(sample_ids)
    return PackedBatch(cu_seqlens_of(torch.tensor(lengths)), tokens, sequences), torch.tensor(place)


def with_advantages(name: str, batch: PackedBatch, **knobs: Any) -> tuple[Any, PackedBatch]:
    algorithm = algorithm_of(ALGORITHMS[name][0](**knobs))  # type: ignore[arg-type]
    actor = MegatronPPOActor.__new__(MegatronPPOActor)  # the engine needs no model for advantages
    actor.algorithm = algorithm
    actor.compute_advantages(batch)
    batch["logprobs"] = batch["prox_logp"] + torch.where(batch["loss_mask"], 0.1 * batch["ref_logp"], 0.0)
    return algorithm, batch


@pytest.mark.parametrize("tool_turns", [False, True], ids=["whole", "tool turns"])
@pytest.mark.parametrize("kl", [{}, {"kl_coef": 0.1, "kl_in": "reward"}], ids=["", "kl in reward"])
@pytest.mark.parametrize("name", RL_NAMES)
def test_segments_have_the_advantages_of_their_whole_sample(name: str, kl: dict[str, Any], tool_turns: bool) -> None:
    if kl and name == "gdpo":
        kl = {}  # refuses it
    extra: dict[str, Any] = {"gamma": 0.9} if name in ("ppo", "reinforce_pp") else {}
    whole = make_batch(tool_turns=tool_turns)
    parts, place = cut(whole)
    knobs = {"aggregate_tokens": 24, **kl, **extra}
    _, whole = with_advantages(name, whole, **knobs)
    _, parts = with_advantages(name, parts, **knobs)
    torch.testing.assert_close(parts["advantages"][place], whole["advantages"], rtol=1e-5, atol=1e-6)
    assert not parts["advantages"][~parts["loss_mask"]].any()
    if "returns" in whole:
        mask = whole["loss_mask"]
        torch.testing.assert_close(parts["returns"][place][mask], whole["returns"][mask], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in RL_NAMES if name != "gspo"])  # its ratio is a segment's
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_the_loss_counts_each_sample_once_however_its_segments_are_spread(name: str, aggregate: str) -> None:
    knobs = {"aggregate": aggregate, "aggregate_tokens": 24}
    algorithm, whole = with_advantages(name, make_batch(), **knobs)
    _, batch = with_advantages(name, cut(make_batch())[0], **knobs)
    expected, _ = algorithm.loss(whole["logprobs"], torch.ones(whole.total_tokens), whole)
    microbatches = [batch.select(range(first, batch.num_seqs, 4)) for first in range(4)]
    assert batch.num_seqs == len(LENGTHS) + sum(map(len, CUTS.values()))
    losses = [float(algorithm.loss(mb["logprobs"], torch.ones(mb.total_tokens), mb)[0]) for mb in microbatches]
    weights = [float(algorithm.loss_weight(mb)) for mb in microbatches]
    joined = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert joined == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
    samples = len(LENGTHS) if aggregate != "token" else int(whole["loss_mask"].sum())
    assert sum(weights) == pytest.approx(samples)


def test_segments_that_carry_no_ids_of_samples_change_nothing() -> None:
    batch = make_batch()
    assert batch.samples.tolist() == list(range(8))
    _, batch = with_advantages("grpo", batch)
    assert "sample_tokens" not in batch
    assert torch.equal(sample_cu_seqlens(batch), batch.cu_seqlens)


def test_equal_ids_in_two_groups_are_two_samples() -> None:
    batch = make_batch()
    batch.set_sequences("sample_ids", torch.tensor([5, 5, 2, 5, 5, 2, 2, 5]))
    assert batch.samples.tolist() == [0, 0, 1, 2, 2, 3, 4, 5]
    assert batch.num_samples == 6
    counts = [n - p for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    expected = [counts[0] + counts[1], counts[2], counts[3] + counts[4], *counts[5:]]
    assert trained_tokens_of_samples(batch).tolist() == expected


def test_segments_apart_from_each_other_are_refused_where_rewards_run_on() -> None:
    batch = make_batch()
    batch.set_sequences("sample_ids", torch.tensor([0, 1, 0, 0, 1, 2, 0, 1]))
    with pytest.raises(ValueError, match="segments of a sample must be next to each other"):
        sample_cu_seqlens(batch)


def test_a_value_for_each_sequence_in_place_of_each_sample_is_refused() -> None:
    class PerSequence(type(algorithm_of(ALGORITHMS["remax"][0]()))):  # type: ignore[misc]
        def sequence_rewards(self, batch: PackedBatch) -> Tensor:
            return batch["rewards"]

    batch = cut(make_batch())[0]
    with pytest.raises(ValueError, match=r"values of shape \(16,\) for 8 samples; give one a sample"):
        PerSequence(ALGORITHMS["remax"][0]()).advantages(batch)


class Steps:
    """Stands in for the engine: keeps the batches of the optimizer steps."""

    def __init__(self) -> None:
        self.parts: list[PackedBatch] = []

    def train(self) -> None:
        pass

    def train_batch(self, part: PackedBatch, *_: Any, **__: Any) -> dict[str, float]:
        self.parts.append(part)
        return {"skipped_steps": 0.0}


def test_the_segments_of_a_sample_are_in_one_optimizer_step() -> None:
    engine: Any = Steps()
    batch = cut(make_batch())[0]
    update_in_minibatches(engine, batch, 3, lambda *_: None, lambda *_: None, "logprobs")  # type: ignore[arg-type, return-value]
    ids = [sorted(set(part["sample_ids"].tolist())) for part in engine.parts]
    assert ids == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert sum(part.num_seqs for part in engine.parts) == batch.num_seqs
    with pytest.raises(ValueError, match=r"8 samples are too few for algorithm\.n_minibatches=9"):
        update_in_minibatches(engine, batch, 9, lambda *_: None, lambda *_: None, "logprobs")  # type: ignore[arg-type, return-value]
