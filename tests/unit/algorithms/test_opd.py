"""On-policy distillation: which tokens each part of the loss trains, and by how much."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.opd import OPD, OPDConfig
from megarl.types import TEACHER_SAMPLED, PackedBatch, cu_seqlens_of

PROX, TEACHER = -1.0, -1.5


def make_batch() -> PackedBatch:
    """Two answers of two tokens to one prompt of one token, with rewards 1 and 0."""
    return PackedBatch(
        cu_seqlens_of(torch.tensor([3, 3])),
        {
            "loss_mask": torch.tensor([0, 1, 1, 0, 1, 1]).bool(),
            "prox_logp": torch.full((6,), PROX),
            "rollout_logprobs": torch.full((6,), PROX),
            "teacher_logp": torch.full((6,), TEACHER),
            "divergence": torch.tensor([9.0, 1.0, 2.0, 9.0, 3.0, 6.0], requires_grad=True),
            "advantages": torch.zeros(6),
        },
        {"rewards": torch.tensor([1.0, 0.0]), "group_ids": torch.zeros(2, dtype=torch.int64)},
    )


def test_rewards_give_the_teachers_own_samples_no_policy_gradient() -> None:
    algorithm, batch = OPD(OPDConfig(divergence="full", reward_coef=2.0)), make_batch()
    both = algorithm.advantages(batch)
    assert (both[1:3] > 0).all()
    assert (both[4:] < 0).all()
    batch.set_sequences(TEACHER_SAMPLED, torch.tensor([True, False]))
    own = algorithm.advantages(batch)
    assert own[:3].tolist() == [0, 0, 0]
    assert torch.equal(own[3:], both[3:])


def test_a_divergence_is_the_loss_and_has_the_gradient_of_a_mean_over_trained_tokens() -> None:
    algorithm, batch = OPD(OPDConfig(divergence="full", teacher_coef=0.5)), make_batch()
    loss, metrics = algorithm.loss(batch["prox_logp"].clone().requires_grad_(), torch.zeros(6), batch)
    assert float(loss) == pytest.approx(0.5 * 3.0)
    assert float(metrics["teacher_divergence"]) == 3.0
    loss.backward()
    gradient = batch["divergence"].grad
    assert gradient is not None
    assert gradient.tolist() == [0, 0.125, 0.125, 0, 0.125, 0.125]


def test_the_teachers_kl_is_above_0_where_the_student_is_surer() -> None:
    _, metrics = OPD(OPDConfig()).loss(torch.full((6,), PROX), torch.zeros(6), make_batch())
    assert float(metrics["teacher_kl"]) == pytest.approx(PROX - TEACHER)


def test_the_loss_of_given_data_falls_as_its_tokens_get_likelier() -> None:
    algorithm, logprobs = OPD(OPDConfig(divergence="full", teacher_coef=0.5, data_coef=0.3)), torch.full((6,), -2.0)
    loss, metrics = algorithm.data_loss(logprobs, torch.zeros(6), make_batch())
    assert float(loss) == pytest.approx(0.5 * 3.0 + 0.3 * 2.0)
    assert float(metrics["data_loss"]) == pytest.approx(2.0)


@pytest.mark.parametrize(("reward_coef", "answers"), [(0.0, 1), (0.5, 2)])
def test_one_answer_a_prompt_will_do_without_rewards(reward_coef: float, answers: int) -> None:
    assert OPD(OPDConfig(reward_coef=reward_coef)).min_group == answers
