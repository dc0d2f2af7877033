"""A wrong dtype, shape, stride, device or value is refused before a kernel runs, in one line with both values."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.knobs import UserError
from megarl.ops.advantage import gae_packed, group_advantage, moments, whiten
from megarl.ops.logprob import gather_logprobs, linear_logprobs, vocab_parallel_logprobs
from megarl.ops.loss import PolicyLossSettings, policy_loss, segment_sum
from megarl.ops.native import HAS_CUDA

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, -1])
F, M = torch.randn(4), torch.ones(4, dtype=torch.bool)
CU = torch.tensor([0, 4], dtype=torch.int32)
SEQUENCE = PolicyLossSettings(ratio="sequence")
HOSTILE = {  # bounds -> the error
    (1, 4): r"begins at 1.*rise from 0 to the 4 tokens",
    (-1, 4): r"begins at -1",
    (0, 6, 4): r"falls from 6 to 4 in sequence 1",
    (0, 3, -5, 4): r"falls from 3 to -5 in sequence 1",
    (0, 2, 1, 4): r"falls from 2 to 1 in sequence 1",
    (0, 1, 1, 2**31 - 1, 4): r"falls from 2147483647 to 4 in sequence 3",
    (0, 2**31 - 1, -(2**31), 4): r"falls from 2147483647 to -2147483648",
    (0, 5): r"ends at 5, but there are 4 tokens",
    (0,): r"ends at 0, but there are 4 tokens",
    (): r"shape \(0,\), expected \(1,\)",
}

CASES = {
    "logits dtype": (lambda: vocab_parallel_logprobs(X.int(), Y, vocab_valid=6), r"torch.int32.*torch.float32"),
    "logits dims": (lambda: vocab_parallel_logprobs(X[0], Y, vocab_valid=6), r"\(6,\).*two dimensions"),
    "logits transposed": (lambda: vocab_parallel_logprobs(X.t(), Y[[0] * 6], vocab_valid=4), r"column stride 6.*1"),
    "logits expanded": (
        lambda: vocab_parallel_logprobs(X[:1].expand(4, 6), Y, vocab_valid=6),
        r"row stride 0.*at least its 6",
    ),
    "labels dtype": (lambda: vocab_parallel_logprobs(X, F, vocab_valid=6), r"torch.float32.*torch.int64"),
    "labels shape": (lambda: vocab_parallel_logprobs(X, Y[:3], vocab_valid=6), r"\(3,\).*\(4,\)"),
    "labels device": (lambda: vocab_parallel_logprobs(X, Y.to("meta"), vocab_valid=6), r"meta.*cpu"),
    "labels range": (lambda: vocab_parallel_logprobs(X, Y + 4, vocab_valid=6), r"\[3, 6\].*6 entries"),
    "vocab_valid": (
        lambda: vocab_parallel_logprobs(X, torch.full((4,), -1), vocab_valid=0),
        r"the vocabulary has 0 entries",
    ),
    "temperature": (lambda: gather_logprobs(X, Y, 0.0), r"temperature is 0.0.*positive"),
    "temperatures": (lambda: gather_logprobs(X, Y, torch.tensor([1.0, -1, 1, 1])), r"-1.0.*positive"),
    "temperature infinite": (lambda: gather_logprobs(X, Y, math.inf), r"temperature is inf.*1e-30 and 1e\+30"),
    "temperature nan": (lambda: gather_logprobs(X, Y, math.nan), r"temperature is nan.*positive"),
    "temperature tiny": (lambda: gather_logprobs(X, Y, 1e-320), r"temperature is 1e-320.*positive"),
    "temperatures infinite": (lambda: gather_logprobs(X, Y, F.new_tensor([1, math.inf, 1, 1])), r"1.0, inf.*positive"),
    "temperatures nan": (lambda: gather_logprobs(X, Y, F.new_tensor([1, 1, math.nan, 1])), r"nan.*positive"),
    "temperatures shape": (lambda: gather_logprobs(X, Y, torch.ones(3)), r"\(3,\).*\(4,\)"),
    "no vocabulary": (lambda: vocab_parallel_logprobs(X[:, :0], Y - 3, vocab_valid=6), r"\(4, 0\).*one column"),
    "no vocabulary to gather": (lambda: gather_logprobs(X[:, :0], Y), r"\(4, 0\).*at least one entry"),
    "no rows of weights": (lambda: linear_logprobs(X, X[:0], Y, vocab_valid=4), r"\(0, 6\).*at least one row"),
    "temperature shape": (
        lambda: vocab_parallel_logprobs(X, Y, vocab_valid=6, temperature=torch.ones(3)),
        r"\(3,\).*\(4,\)",
    ),
    "gather shape": (lambda: gather_logprobs(X, Y[:2]), r"\(4, 6\).*\(2,\)"),
    "weight dtype": (lambda: linear_logprobs(X, X.half(), Y, vocab_valid=4), r"torch.float16.*torch.float32"),
    "weight shape": (lambda: linear_logprobs(X, X[:, :5], Y, vocab_valid=4), r"\(4, 5\).*\(4, 6\)"),
    "main_grad": (lambda: linear_logprobs(X, X, Y, vocab_valid=4, main_grad=X.double()), r"float64.*float32"),
    "dtype of sums": (
        lambda: linear_logprobs(X, X, Y, vocab_valid=4, weight_grad_dtype=torch.bfloat16),
        r"weight_grad_dtype is torch.bfloat16, expected torch.float32, for a torch.float32 weight",
    ),
    "dtype of sums beside a main gradient": (
        lambda: linear_logprobs(X, X, Y, vocab_valid=4, main_grad=X.clone(), weight_grad_dtype=torch.float32),
        r"weight_grad_dtype=torch.float32 with main_grad",
    ),
    "chunk_rows": (lambda: linear_logprobs(X, X, Y, vocab_valid=4, chunk_rows=0), r"chunk_rows is 0"),
    "group ids": (lambda: group_advantage(F, Y[:3]), r"\(3,\).*\(4,\)"),
    "group ids dtype": (lambda: group_advantage(F, Y.int()), r"torch.int32.*torch.int64"),
    "rewards dtype": (lambda: group_advantage(F.double(), Y), r"torch.float64.*torch.float32"),
    "mode": (lambda: group_advantage(F, Y, mode="median"), r"'median'.*mean_std"),
    "aggregation": (lambda: group_advantage(F, Y, aggregation="x"), r"'x'.*sum_then_normalize"),
    "gae values": (lambda: gae_packed(F, F[:3], M, CU), r"\(3,\).*\(4,\)"),
    "gae mask": (lambda: gae_packed(F, F, F, CU), r"torch.float32.*torch.bool"),
    "gae cu": (lambda: gae_packed(F, F, M, CU[:1]), r"ends at 0.*4 tokens"),
    "gae bootstrap": (lambda: gae_packed(F, F, M, CU, bootstrap=F), r"\(4,\).*\(1,\)"),
    "gae lambda": (lambda: gae_packed(F, F, M, CU, lam=F), r"\(4,\).*\(1,\)"),
    "gae stride": (lambda: gae_packed(X[:, 0], F, M, CU), r"strides \(6,\).*contiguous"),
    "moments": (lambda: moments(F, M[:2]), r"\(2,\).*\(4,\)"),
    "clip": (lambda: whiten(F, M, clip=-1.0), r"clip is -1.0.*positive"),
    "loss shape": (lambda: policy_loss(F, F[:3], F, M, settings=PolicyLossSettings()), r"\(3,\).*\(4,\)"),
    "loss dtype": (lambda: policy_loss(F.half(), F, F, M, settings=PolicyLossSettings()), r"float16.*float32"),
    "loss ref": (
        lambda: policy_loss(F, F, F, M, settings=PolicyLossSettings(kl_estimator="k3")),
        r"ref_logprobs is missing",
    ),
    "loss cu": (
        lambda: policy_loss(F, F, F, M, settings=PolicyLossSettings(ratio="sequence")),
        r"cu_seqlens is missing",
    ),
    "segment cu": (lambda: segment_sum(F, M, CU * 2), r"ends at 8.*4 tokens"),
    "loss shape, sequence": (
        lambda: policy_loss(F, F[:3], F, M, settings=SEQUENCE, cu_seqlens=CU),
        r"old_logprobs has shape \(3,\).*\(4,\)",
    ),
}
SETTINGS = {
    r"objective=tanh must be one of clip, cispo": {"objective": "tanh"},
    r"ratio=word must be one of token, sequence": {"ratio": "word"},
    r"kl_estimator=k9 must be one of none, k1": {"kl_estimator": "k9"},
    r"correction=clamp must be one of none, truncate": {"correction": "clamp"},
    r"dual_clip=0.5 must be above 1": {"dual_clip": 0.5},
    r"dual_clip=nan must be above 1": {"dual_clip": math.nan},
    r"clip_low=-1.0 must be at least 0": {"clip_low": -1.0},
    r"clip_high=nan must be at least 0": {"clip_high": math.nan},
    r"kl_coef=inf must be at least": {"kl_coef": math.inf},
    r"entropy_coef=nan must be at least": {"entropy_coef": math.nan},
    r"correction_low is 3.0 and correction_high 2.0.*rise": {"correction_low": 3.0},
    r"correction_high=nan must be above 0": {"correction_high": math.nan},
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_arguments_are_refused_with_both_values(name):
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", SETTINGS)
def test_settings_that_no_run_could_use_are_a_users_mistake(message):
    """The commands print a UserError's line and exit with 2; another error would be a traceback."""
    with pytest.raises(UserError, match=message) as caught:
        PolicyLossSettings(**SETTINGS[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bounds", HOSTILE, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_sequences_are_checked_to_the_last(bounds, dtype):
    """Each would have a kernel read or write outside of its tensors, or leave tokens unwritten."""
    cu = torch.tensor(bounds, dtype=dtype)
    for call in (
        lambda: gae_packed(F, F, M, cu),
        lambda: segment_sum(F, M, cu),
        lambda: policy_loss(F, F, F, M, settings=SEQUENCE, cu_seqlens=cu),
    ):
        with pytest.raises(ValueError, match=HOSTILE[bounds] if dtype == torch.int32 else "torch.int64") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_build_without_cuda_says_so():
    if HAS_CUDA:
        pytest.skip("this build has the CUDA kernels")
    from megarl.ops.native import _C

    with pytest.raises(RuntimeError, match="MEGARL_CUDA=1"):
        _C.moments(_C.Where(True, 0, 0), 0, 0, 0, 0, 0)
