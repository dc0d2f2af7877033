"""On-policy distillation: the student samples, a teacher judges each token (Agarwal et al., GKD,
https://arxiv.org/abs/2306.13649; Lu and Thinking Machines Lab, https://thinkingmachines.ai/blog/on-policy-distillation/).

    sampled      A_t = teacher_coef (log pi_teacher(o_t) - log pi_prox(o_t)), reverse KL of the sampled tokens
    top_k, full  L   = teacher_coef mean of D_beta(teacher, student) over the tokens, differentiated as it stands

To both is added `reward_coef` times GRPO's advantage of the task's rewards, with PPO's clipped loss. `beta` chooses the
divergence: 0 is forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence (`ops/divergence.py`).
`top_k` compares the teacher's k most likely tokens and the rest as one event.

With method=sft the data has the tokens, and the loss is

    L = mean of teacher_coef D_beta(teacher, student) - data_coef log pi(o_t)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.base import ClipConfig, GroupConfig, broadcast_to_tokens, token_weights
from megarl.algorithms.policy_gradient import PolicyGradient
from megarl.knobs import MAX_COUNT, MAX_WEIGHT, UserError, knob
from megarl.ops.advantage import group_advantage
from megarl.types import TEACHER_SAMPLED, Metrics, PackedBatch

DIVERGENCES = ("sampled", "top_k", "full")


@dataclass(frozen=True)
class OPDConfig(ClipConfig, GroupConfig):
    """Knobs of distillation from `teacher`."""

    divergence: str = knob(
        "sampled",
        "tokens that are compared with the teacher: sampled (policy gradient), its top_k, or full (all tokens)",
        choices=DIVERGENCES,
    )
    beta: float = knob(
        1.0,
        "top_k and full: 0 is KL(teacher || student), 1 KL(student || teacher), between: GKD's JSD",
        least=0,
        most=1,
    )
    top_k: int = knob(
        32, "divergence=top_k: the teacher's most likely tokens that are compared; the rest counts as one", least=1,
        most=4096,
    )  # fmt: skip
    teacher_coef: float = knob(1.0, "weight of the teacher", least=0, most=MAX_WEIGHT)
    reward_coef: float = knob(0.0, "weight of GRPO's advantages of the rewards beside the teacher", least=0,
        most=MAX_WEIGHT)  # fmt: skip
    data_coef: float = knob(0.0, "method=sft: weight of the data's own next-token loss", least=0, most=MAX_WEIGHT)
    max_log_ratio: float = knob(
        10.0, "sampled: log pi_teacher - log pi is clipped to this size, in nats", above=0, most=MAX_COUNT
    )
    lmbda: float = knob(
        1.0,
        "share of prompts that the student answers; the others the teacher's server (GKD's lambda)",
        least=0,
        most=1,
    )

    def check(self) -> None:
        super().check()
        if self.teacher_coef == 0:
            raise UserError(
                "algorithm.teacher_coef=0 learns nothing from the teacher; set it above 0, or algorithm=grpo"
            )
        if self.kl_coef > 0 and self.kl_in == "reward" and self.reward_coef == 0:
            raise UserError(
                "algorithm.kl_in=reward: with algorithm.reward_coef=0 no reward is learned from, and so no KL in it; "
                "set kl_in=loss, or reward_coef above 0"
            )
        if self.divergence == "sampled" and self.beta != 1:
            raise UserError(
                f"algorithm.beta={self.beta} needs the teacher's distribution, and algorithm.divergence=sampled is "
                "reverse KL; set divergence to top_k or full"
            )
        if self.divergence == "sampled" and self.lmbda < 1:
            raise UserError(
                f"algorithm.lmbda={self.lmbda} trains on the teacher's samples too, and algorithm.divergence=sampled "
                "holds for the student's alone; set divergence to top_k or full"
            )


class OPD(PolicyGradient):
    """On-policy distillation.

    Reads `teacher_logp` `[total_tokens]` in `advantages` if `divergence=sampled`, else `divergence` in `loss`.
    """

    needs_teacher = True

    def __init__(self, config: OPDConfig) -> None:
        super().__init__(config, clip_low=config.eps_clip, clip_high=config.eps_clip, objective="clip", ratio="token")
        self.config = config
        self.min_group = 2 if config.reward_coef > 0 else 1
        self.sampled = config.divergence == "sampled"
        self.needs_prox_logp = self.needs_prox_logp or self.sampled

    def advantages(self, batch: PackedBatch) -> Tensor:
        config, mask = self.config, batch["loss_mask"].bool()
        advantages = torch.zeros(batch.total_tokens)
        if config.reward_coef > 0:
            rewards = group_advantage(
                self.sequence_rewards(batch), self.groups(batch), mode="mean_std", eps=config.advantage_eps
            )
            if TEACHER_SAMPLED in batch:  # not the policy's own tokens: no policy gradient
                rewards = rewards.masked_fill(batch.of_samples(TEACHER_SAMPLED).bool(), 0.0)
            advantages = config.reward_coef * broadcast_to_tokens(rewards, batch)
        if self.sampled:
            log_ratio = (batch["teacher_logp"] - batch["prox_logp"]).clamp(-config.max_log_ratio, config.max_log_ratio)
            advantages = advantages + config.teacher_coef * log_ratio.masked_fill(~mask, 0.0)
        return advantages

    def loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().loss(logprobs, entropy, data)
        weights = token_weights(data, self.config.aggregate, self.config.aggregate_tokens)
        if self.sampled:
            gap = (logprobs.detach() - data["teacher_logp"]).masked_fill(~data["loss_mask"].bool(), 0.0)
            return loss, {**metrics, "teacher_kl": (gap * weights).sum()}
        divergence = (data["divergence"] * weights).sum()
        return loss + self.config.teacher_coef * divergence, {**metrics, "teacher_divergence": divergence.detach()}

    def data_loss(self, logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss of method=sft, a mean over the trained tokens of a microbatch, and its metrics."""
        weights = token_weights(data, "token")
        divergence, nll = (data["divergence"] * weights).sum(), -(logprobs * weights).sum()
        loss = self.config.teacher_coef * divergence + self.config.data_coef * nll
        metrics = {"teacher_divergence": divergence, "data_loss": nll, "entropy": (entropy * weights).sum()}
        return loss, {name: value.detach() for name, value in metrics.items()}
