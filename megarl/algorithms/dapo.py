"""DAPO: GRPO with two clip bounds and dynamic sampling (Yu et al., https://arxiv.org/abs/2503.14476, section 3).

GRPO's advantages with four changes:

    clip-higher        clip(rho_t, 1 - clip_low, 1 + clip_high), clip_high > clip_low
    dynamic sampling   groups with equal rewards are dropped, and other prompts sampled in their place
    token-level loss   the mean runs over all tokens of the batch
    overlong shaping   for a completion of n tokens, with the budget L, the buffer B and the penalty p:
                       r += 0                     for n <= L - B
                            p (L - B - n) / B     for L - B < n <= L
                            -p                    for n > L          (a completion truncated at L has n = L and gets -p)

The paper's p is 1 where a wrong answer has the reward -1 and a right one 1. With 0 and 1 it is 0.5. Of a conversation,
n is its longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import UNBOUNDED, GroupConfig
from megarl.algorithms.policy_gradient import GroupRelative
from megarl.knobs import MAX_COUNT, UserError, knob
from megarl.types import PackedBatch


@dataclass(frozen=True)
class DAPOConfig(GroupConfig):
    """Knobs of DAPO."""

    clip_low: float = knob(0.2, "the ratio is clipped below at 1 - clip_low", above=0, most=1)
    clip_high: float = knob(0.28, "the ratio is clipped above at 1 + clip_high", above=0, most=UNBOUNDED)
    dynamic_sampling: bool = knob(True, "drop groups with equal rewards, and sample other prompts in their place")
    overlong_buffer: int = knob(
        0,
        "tokens before overlong_budget over which the reward falls by up to overlong_penalty; 0: off",
        least=0,
        most=MAX_COUNT,
    )
    overlong_budget: int = knob(
        0, "longest completion in tokens; its last overlong_buffer tokens reduce the reward", least=0, most=MAX_COUNT
    )
    overlong_penalty: float = knob(
        1.0, "what a completion of overlong_budget tokens loses of its reward", above=0, most=UNBOUNDED
    )

    def check(self) -> None:
        super().check()
        if self.overlong_buffer > self.overlong_budget:
            raise UserError(
                f"algorithm.overlong_buffer={self.overlong_buffer} must be at most algorithm.overlong_budget="
                f"{self.overlong_budget}"
            )


class DAPO(GroupRelative):
    """DAPO."""

    def __init__(self, config: DAPOConfig) -> None:
        super().__init__(config, clip_low=config.clip_low, clip_high=config.clip_high)
        self.config = config

    def sequence_rewards(self, batch: PackedBatch) -> Tensor:
        return super().sequence_rewards(batch) + self.overlong_penalty(longest_answers(batch))

    def overlong_penalty(self, tokens: Tensor) -> Tensor:
        """Returns what is added to the reward, float32 at most 0, for completions of `tokens` tokens."""
        if self.config.overlong_buffer == 0:
            return torch.zeros_like(tokens)
        excess = tokens - (self.config.overlong_budget - self.config.overlong_buffer)
        return -self.config.overlong_penalty * (excess / self.config.overlong_buffer).clamp(0.0, 1.0)

    def should_accept(self, group: PackedBatch) -> bool:
        return not self.config.dynamic_sampling or bool((group["rewards"] != group["rewards"][0]).any())


def longest_answers(batch: PackedBatch) -> Tensor:
    """Counts the tokens of each sample's longest run of trained tokens, float32 `[num_samples]`."""
    mask = batch["loss_mask"].bool()
    before = mask.roll(1).index_fill(0, batch.cu_seqlens[:-1].long(), False)
    begins = mask & ~before
    owner = batch.owners
    counts = (begins.cumsum(0)[mask] - 1).bincount(minlength=int(begins.sum())).float()
    return torch.zeros(batch.num_samples).scatter_reduce(0, owner[begins], counts, "amax")
