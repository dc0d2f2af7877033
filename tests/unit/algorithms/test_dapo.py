"""DAPO: the penalty of overlong completions, and groups that are dropped."""

from __future__ import annotations

import torch

from megarl.algorithms.dapo import DAPO, DAPOConfig, longest_answers
from megarl.types import PackedBatch, cu_seqlens_of
from tests.unit.algorithms.test_rl import make_batch


def test_dapo_drops_groups_with_equal_rewards_and_penalises_overlong_completions() -> None:
    algorithm = DAPO(DAPOConfig(overlong_buffer=4, overlong_budget=10))
    penalties = algorithm.overlong_penalty(torch.tensor([1.0, 6.0, 8.0, 10.0, 12.0]))
    assert penalties.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    group = make_batch().select([0, 1, 2])
    assert algorithm.should_accept(group)
    group["rewards"] = torch.ones(3)
    assert not algorithm.should_accept(group)
    assert DAPO(DAPOConfig(dynamic_sampling=False)).should_accept(group)


def test_a_conversation_is_penalised_for_its_longest_answer() -> None:
    """The budget is what an answer may have, and three answers of half of it are none too long."""
    lengths = torch.tensor([15, 6, 12])  # the first two are segments of one sample
    flags = [False] * 3 + [True] * 4 + [False] + [True] * 4 + [False] + [True] * 2  # answers of 4, 4 and 2 tokens
    flags += [False] + [True] * 5  # one of 5
    flags += [True] * 10 + [False] * 2  # it does not go on with the answer before it
    batch = PackedBatch(
        cu_seqlens_of(lengths),
        {"loss_mask": torch.tensor(flags)},
        {
            "rewards": torch.tensor([1.0, 1.0, 1.0]),
            "group_ids": torch.zeros(3, dtype=torch.int64),
            "sample_ids": torch.tensor([0, 0, 1]),
        },
    )
    assert longest_answers(batch).tolist() == [5.0, 10.0]
    algorithm = DAPO(DAPOConfig(overlong_buffer=4, overlong_budget=10))
    assert algorithm.sequence_rewards(batch).tolist() == [1.0, 0.0]


def test_half_of_the_penalty_on_rewards_of_0_and_1_gives_the_papers_advantages() -> None:
    """DAPO, equations 7 and 13: a right answer has 1 and a wrong one -1, and the longest ones lose 1."""
    lengths = torch.tensor([5] * 8 + [9] * 8)
    batch = PackedBatch(
        cu_seqlens_of(lengths),
        {"loss_mask": torch.cat([torch.arange(n) > 0 for n in lengths.tolist()])},
        {"rewards": torch.tensor([1.0] + [0.0] * 15), "group_ids": torch.zeros(16, dtype=torch.int64)},
    )
    algorithm = DAPO(DAPOConfig(overlong_buffer=4, overlong_budget=8, overlong_penalty=0.5))
    found = algorithm.advantages(batch)[batch.cu_seqlens[1:].long() - 1]
    paper = torch.tensor([1.0] + [-1.0] * 7 + [-2.0] * 8)
    torch.testing.assert_close(found, (paper - paper.mean()) / paper.std(), rtol=1e-4, atol=1e-5)
