"""Operators under torch.compile: no graph breaks, the same bits, and fake implementations that match the real ones."""

from __future__ import annotations

import pytest
import torch

from megarl.ops import advantage, logprob_kernels
from megarl.ops.logprob import vocab_parallel_logprobs
from megarl.ops.loss import PolicyLossSettings, policy_loss, segment_sum

LOGITS, LABELS, ONE = torch.randn(4, 9), torch.tensor([0, 8, -1, 3]), torch.ones(1, dtype=torch.float64)
F, M, CU = torch.randn(4), torch.tensor([True, False, True, True]), torch.tensor([0, 1, 4], dtype=torch.int32)


@pytest.fixture
def compiler(monkeypatch):
    """Turns the compiler on, which `make test` leaves out."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch._dynamo.config, "disable", False)


@pytest.mark.usefixtures("compiler")
def test_a_training_step_compiles_into_one_graph_with_the_same_bits():
    old, advantages = torch.randn(4), torch.randn(4)

    def step(logits, labels, old, advantages, mask):
        logprob, entropy = vocab_parallel_logprobs(logits, labels, vocab_valid=9, with_entropy=True, temperature=0.9)
        settings = PolicyLossSettings(entropy_coef=0.01)
        return policy_loss(logprob, old, advantages, mask, settings=settings, entropy=entropy).loss.sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (step, compiled):
        leaf = LOGITS.clone().requires_grad_()
        loss = run(leaf, LABELS, old, advantages, M)
        loss.backward()
        grads.append((loss.detach(), leaf.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_every_fake_implementation_matches_the_real_one():
    stats = logprob_kernels.logprob_stats(LOGITS, LABELS, ONE, 9, 0, True)
    _, _, context = logprob_kernels.logprob_merge(stats[None], LABELS, ONE)
    moments = advantage.moments(F, M)
    numbers, codes = [0.2, 0.2, 0.0, 0.0, 0.0, 2.0, 0.0], [0, 0, 0, 0]
    calls = {
        "logprob_stats": (LOGITS, LABELS, ONE, 9, 0, True),
        "logprob_rows": (LOGITS, LABELS, ONE, 9, 0, True),
        "logprob_merge": (stats[None], LABELS, ONE),
        "logprob_backward": (LOGITS, LABELS, ONE, context, F, F, 9, 0),
        "logprob_backward_": (LOGITS.clone(), LABELS, ONE, context, F, None, 9, 0),
        "group_advantage": (F[:, None], LABELS.argsort(), LABELS.sort().values, 0, 1e-6, False),
        "gae": (F, F, M, CU, None, 0.9, torch.ones(1)),
        "moments": (F, M),
        "moments_merge": (moments[None],),
        "whiten": (F, M, moments, 1e-8, False, 2.0),
        "policy_loss": (F, F, F, M, None, None, None, torch.zeros(2), CU, numbers, codes),
        "segment_sum": (F, M, CU),
    }
    assert segment_sum
    registered = {name for name in dir(torch.ops.megarl) if not name.startswith("_") and name != "name"}
    assert set(calls) <= registered
    for name, arguments in calls.items():
        operator = getattr(torch.ops.megarl, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
