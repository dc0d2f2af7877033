"""Policy loss of every token, with its gradient and metrics in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.knobs import MAX_WEIGHT, UserError, check_ranges, knob
from megarl.ops.first_derivative import first_derivative_only
from megarl.ops.native import _C, DTYPE_CODES, address, check, check_cu_seqlens, where

# A name's index is its code in the kernel.
OBJECTIVES = ("clip", "cispo")
KL_ESTIMATORS = ("none", "k1", "k2", "k3")
CORRECTIONS = ("none", "truncate", "mask")
RATIO_LEVELS = ("token", "sequence")

# Entries of `PolicyLoss.sums` in the kernel's order: sums over the unmasked tokens, then maxima.
POLICY_LOSS_SUMS = (
    *("tokens", "loss", "policy_loss", "ref_kl", "entropy", "ratio", "clipped_low", "clipped_high", "dual_clipped"),
    *("approx_kl", "correction_weight", "corrected", "ratio_max", "correction_weight_max"),
)


@dataclass(frozen=True)
class PolicyLossSettings:
    """Settings of the policy objective.

    The defaults are PPO's and GRPO's. DAPO has clip_high above clip_low, GSPO has ratio "sequence".
    """

    objective: str = knob(
        "clip", "clip (PPO), or cispo: the clipped ratio is a constant weight of the log-prob", choices=OBJECTIVES
    )
    ratio: str = knob(
        "token", "importance ratio per token or per sequence (GSPO: mean log-ratio)", choices=RATIO_LEVELS
    )
    clip_low: float = knob(0.2, "the ratio is clipped below at 1 - clip_low", least=0, most=1e9)
    clip_high: float = knob(0.2, "the ratio is clipped above at 1 + clip_high", least=0, most=1e30)
    dual_clip: float | None = knob(
        None, "bound on the loss for a negative advantage, as a multiple of it; above 1", above=1, most=1e9
    )
    kl_estimator: str = knob(
        "none", "KL penalty against the reference policy: none, k1, k2 or k3", choices=KL_ESTIMATORS
    )
    kl_coef: float = knob(0.0, "weight of the KL penalty", least=-MAX_WEIGHT, most=MAX_WEIGHT)
    entropy_coef: float = knob(0.0, "weight of the entropy bonus", least=-MAX_WEIGHT, most=MAX_WEIGHT)
    correction: str = knob(
        "none", "weight old/rollout policy: none, truncate (TIS) or mask (IcePop)", choices=CORRECTIONS
    )
    correction_low: float = knob(0.0, "mask: weights below become 0", least=0, most=1e9)
    correction_high: float = knob(2.0, "truncate: the largest weight; mask: weights above become 0", above=0, most=1e9)

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # the trace knows no dataclass fields
            check_ranges(self)
        if self.correction_low > self.correction_high:
            raise UserError(
                f"correction_low is {self.correction_low} and correction_high {self.correction_high}; they must rise"
            )


class PolicyLoss(NamedTuple):
    """Result of `policy_loss`."""

    loss: Tensor  # [tokens], 0 where masked; not yet averaged over the global batch
    sums: Tensor  # float64 [len(POLICY_LOSS_SUMS)], over the local tokens


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    settings: PolicyLossSettings,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> PolicyLoss:
    """Computes the policy loss per token, differentiable in `logprobs` and `entropy`.

    csrc/loss/policy_loss_math.h has the formulas. All tensors of values have the shape and dtype of `logprobs`.

    Args:
        logprobs: float32 or float64 `[tokens]`, of the policy.
        old_logprobs: of the policy in the denominator of the ratio.
        advantages: per token.
        loss_mask: bool `[tokens]`; False tokens are not read and get 0.
        ref_logprobs: of the reference policy; needed unless `settings.kl_estimator` is "none".
        rollout_logprobs: of the policy that sampled; needed unless `settings.correction` is "none".
        entropy: of the policy; a bonus if `settings.entropy_coef` is not 0, else only a metric.
        cu_seqlens: int32 `[num_seqs + 1]`, rising from 0 to `tokens`; needed for the sequence ratio.

    Returns:
        The loss of each token, not yet averaged, and the metric sums (see `policy_loss_metrics`).

    Raises:
        ValueError: a tensor that the settings need is missing, or its dtype, shape or device does not fit.
    """
    for name, needed, value in (
        ("ref_logprobs", settings.kl_estimator != "none", ref_logprobs),
        ("rollout_logprobs", settings.correction != "none", rollout_logprobs),
        ("cu_seqlens", settings.ratio == "sequence", cu_seqlens),
        ("entropy", settings.entropy_coef != 0, entropy),
    ):
        if needed and value is None:
            raise ValueError(f"{name} is missing, but {settings} needs it; pass it or change the settings")
    fixed = [old_logprobs, advantages, ref_logprobs, rollout_logprobs]
    detached = [t.detach() if t is not None else None for t in fixed]
    loss, sums = _PolicyLoss.apply(logprobs, entropy, loss_mask, settings, cu_seqlens, *detached)
    return PolicyLoss(loss, sums)


def policy_loss_metrics(sums: Tensor) -> dict[str, Tensor]:
    """Returns means over the tokens by name (`loss`, `ratio`, `clipped_low`, a fraction, ...), and the maxima.

    All are float64 scalars on the device of `sums`, and not read here, because reading waits for the device.
    """
    named = dict(zip(POLICY_LOSS_SUMS, sums.unbind(), strict=True))
    means = dict(zip(POLICY_LOSS_SUMS, (sums / sums[0].clamp(min=1)).unbind(), strict=True))
    return {k: v if k == "tokens" or k.endswith("_max") else means[k] for k, v in named.items()}


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor | None,
        mask: Tensor,
        settings: PolicyLossSettings,
        cu_seqlens: Tensor | None,
        old: Tensor,
        advantages: Tensor,
        ref: Tensor | None,
        rollout: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        sequence_ratio = None
        if settings.ratio == "sequence":
            assert cu_seqlens is not None
            check("old_logprobs", old, dtype=logprobs.dtype, shape=tuple(logprobs.shape), device=logprobs.device)
            sums = segment_sum(logprobs - old, mask, cu_seqlens)
            sequence_ratio = (sums[:, 0] / sums[:, 1].clamp(min=1)).to(logprobs.dtype)
            ctx.counts = sums[:, 1]
        numbers, codes = _settings_lists(settings)
        loss, d_logprob, d_ratio, sums = _policy_loss(
            logprobs, old, advantages, mask, ref, rollout, entropy, sequence_ratio, cu_seqlens, numbers, codes
        )
        ctx.save_for_backward(mask, d_logprob, d_ratio, cu_seqlens)
        ctx.settings, ctx.has_entropy = settings, entropy is not None
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    @first_derivative_only("policy_loss", "megarl.ops.torch_twins.policy_loss")
    def backward(ctx: Any, grad_loss: Tensor, grad_sums: Tensor) -> tuple[Any, ...]:
        mask, d_logprob, d_ratio, cu_seqlens = ctx.saved_tensors
        grad = grad_loss * d_logprob
        if ctx.settings.ratio == "sequence":
            # Each token changes its sequence's mean log-ratio by 1/count, and so the loss of all its tokens.
            d_log_ratio = segment_sum(grad_loss * d_ratio, mask, cu_seqlens)[:, 0]
            per_token = (d_log_ratio / ctx.counts.clamp(min=1)).to(grad.dtype)
            spread = torch.repeat_interleave(per_token, cu_seqlens.diff().long(), output_size=mask.numel())
            grad = torch.where(mask, grad + spread, grad)
        d_entropy = None
        if ctx.has_entropy:
            d_entropy = torch.where(mask, grad_loss * -ctx.settings.entropy_coef, torch.zeros_like(grad_loss))
        return grad, d_entropy, *(None,) * 7


def _settings_lists(s: PolicyLossSettings) -> tuple[list[float], list[int]]:
    """Flattens the settings into lists of floats and codes, which an operator can take."""
    numbers = [s.clip_low, s.clip_high, s.dual_clip or 0.0, s.kl_coef, s.correction_low, s.correction_high]
    codes = [OBJECTIVES.index(s.objective), RATIO_LEVELS.index(s.ratio), KL_ESTIMATORS.index(s.kl_estimator)]
    return [*numbers, s.entropy_coef], [*codes, CORRECTIONS.index(s.correction)]


@torch.library.custom_op("megarl::policy_loss", mutates_args=())
def _policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor | None,
    rollout: Tensor | None,
    entropy: Tensor | None,
    sequence_ratio: Tensor | None,
    cu_seqlens: Tensor | None,
    numbers: list[float],
    codes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, device, dtype = (logprobs.numel(),), logprobs.device, logprobs.dtype
    check("logprobs", logprobs, dtype=(torch.float32, torch.float64), shape=shape, device=device)
    named = {"old_logprobs": old, "advantages": advantages, "ref_logprobs": ref}
    for name, tensor in {**named, "rollout_logprobs": rollout, "entropy": entropy}.items():
        if tensor is not None:
            check(name, tensor, dtype=dtype, shape=shape, device=device)
    check("loss_mask", mask, dtype=torch.bool, shape=shape, device=device)
    sequences = 0
    if sequence_ratio is not None:
        sequences = sequence_ratio.numel()
        check("sequence_ratio", sequence_ratio, dtype=dtype, shape=(sequences,), device=device)
        assert cu_seqlens is not None  # checked by segment_sum
    loss, d_logprob = torch.empty_like(logprobs), torch.empty_like(logprobs)
    d_ratio = torch.empty_like(logprobs) if sequence_ratio is not None else logprobs.new_empty(0)
    chunks = -(-shape[0] // _C.loss_chunk)
    partials = torch.empty(chunks, _C.loss_sums, dtype=torch.float64, device=device)
    sums = torch.empty(_C.loss_sums, dtype=torch.float64, device=device)
    _C.policy_loss(
        *(where(logprobs), shape[0], sequences, DTYPE_CODES[dtype], _native_settings(numbers, codes)),
        *(address(t) for t in (logprobs, old, advantages, ref, rollout, entropy, mask)),
        *(address(sequence_ratio), address(cu_seqlens if sequences else None), loss.data_ptr()),
        *(d_logprob.data_ptr(), d_ratio.data_ptr() if sequence_ratio is not None else 0),
        *(partials.data_ptr(), sums.data_ptr()),
    )
    return loss, d_logprob, d_ratio, sums


@_policy_loss.register_fake
def _(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref: Tensor | None,
    rollout: Tensor | None,
    entropy: Tensor | None,
    sequence_ratio: Tensor | None,
    cu_seqlens: Tensor | None,
    numbers: list[float],
    codes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_ratio = torch.empty_like(logprobs) if sequence_ratio is not None else logprobs.new_empty(0)
    sums = logprobs.new_empty(_C.loss_sums, dtype=torch.float64)
    return torch.empty_like(logprobs), torch.empty_like(logprobs), d_ratio, sums


def _native_settings(numbers: list[float], codes: list[int]) -> Any:
    clip_low, clip_high, dual_clip, kl_coef, correction_low, correction_high, entropy_coef = numbers
    objective, ratio_level, kl_estimator, correction = codes
    return _C.PolicyLossSettings(
        objective=objective,
        sequence_ratio=bool(ratio_level),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl_estimator=kl_estimator,
        kl_coef=kl_coef,
        correction=correction,
        correction_low=correction_low,
        correction_high=correction_high,
        entropy_coef=entropy_coef,
    )


@torch.library.custom_op("megarl::segment_sum", mutates_args=())
def segment_sum(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Computes sum and count of the unmasked values of each packed sequence: float64 `[num_seqs, 2]`."""
    shape, sequences = (x.numel(),), cu_seqlens.numel() - 1
    check("x", x, dtype=(torch.float32, torch.float64), shape=shape, device=x.device)
    check("mask", mask, dtype=torch.bool, shape=shape, device=x.device)
    check_cu_seqlens(cu_seqlens, shape[0], x.device)
    sums = torch.empty(sequences, 2, dtype=torch.float64, device=x.device)
    _C.segment_sum(
        where(x), sequences, DTYPE_CODES[x.dtype], x.data_ptr(), mask.data_ptr(), cu_seqlens.data_ptr(), sums.data_ptr()
    )
    return sums


@segment_sum.register_fake
def _(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return x.new_empty((cu_seqlens.numel() - 1, 2), dtype=torch.float64)
