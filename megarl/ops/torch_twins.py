"""Plain-torch twins of the operations, with the same names and results. For reading, tests and debugging.

They need the whole vocabulary and all tokens (no process groups), run on any device and differentiate by autograd.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.ops.advantage import Aggregation, GroupMode
from megarl.ops.loss import PolicyLoss, PolicyLossSettings
from megarl.ops.quantize import INT4_STEPS, INT4_ZERO, LARGEST, LEAST


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_valid: int,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `megarl.ops.logprob.vocab_parallel_logprobs`; logits have the whole vocabulary."""
    x = logits[:, :vocab_valid].to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if isinstance(temperature, Tensor) and temperature.numel() > 1:
        temperature = temperature.unsqueeze(1)
    all_logprobs = (x / temperature).log_softmax(-1)
    has_label = labels != -1
    logprob = all_logprobs.gather(1, labels.long().clamp(min=0).unsqueeze(1)).squeeze(1)
    logprob = torch.where(has_label, logprob, torch.zeros_like(logprob))
    if not with_entropy:
        return logprob, None
    finite = torch.where(all_logprobs == -torch.inf, torch.zeros_like(all_logprobs), all_logprobs)
    entropy = -(all_logprobs.exp() * finite).sum(-1)
    return logprob, torch.where(has_label, entropy, torch.zeros_like(entropy))


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_valid: int,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `megarl.ops.logprob.linear_logprobs`; this one holds all logits."""
    return vocab_parallel_logprobs(
        hidden @ weight.t(), labels, vocab_valid=vocab_valid, temperature=temperature, with_entropy=with_entropy
    )


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mode: GroupMode = "mean_std",
    eps: float = 1e-6,
    aggregation: Aggregation = "sum_then_normalize",
) -> Tensor:
    """See `megarl.ops.advantage.group_advantage`."""
    columns = (rewards if rewards.ndim == 2 else rewards.unsqueeze(1)).double()
    if aggregation == "sum_then_normalize":
        columns = columns.sum(1, keepdim=True)
    out = torch.zeros_like(columns)
    for group in group_ids.unique():
        members = group_ids == group
        r = columns[members]
        if len(r) < 2:
            continue
        centred = r - r.mean(0)
        if mode == "mean_std":
            centred = centred / (r.std(0) + eps)
        elif mode == "leave_one_out":
            centred = r - (r.sum(0) - r) / (len(r) - 1)
        out[members] = centred
    return out.sum(1).float()


def gae_packed(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `megarl.ops.advantage.gae_packed`; this one loops over time."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    bounds = cu_seqlens.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        decay = gamma * float(lam if not isinstance(lam, Tensor) else lam.expand(len(bounds) - 1)[b])
        advantage, next_value = 0.0, float(bootstrap[b]) if bootstrap is not None else 0.0
        for t in range(end - 1, begin - 1, -1):
            if not mask[t]:
                continue
            value = float(values[t])
            advantage = float(rewards[t]) + gamma * next_value - value + decay * advantage
            advantages[t], returns[t] = advantage, advantage + value
            next_value = value
    return advantages, returns


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """See `megarl.ops.advantage.moments`."""
    unmasked = x[mask].double()
    mean = unmasked.mean() if unmasked.numel() else unmasked.new_zeros(())
    return torch.stack([unmasked.new_tensor(float(unmasked.numel())), mean, (unmasked - mean).square().sum()])


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, clip: float | None = None, eps: float = 1e-8) -> Tensor:
    """See `megarl.ops.advantage.whiten`."""
    count, mean, m2 = moments(x, mask)
    out = (x.double() - mean) / (m2 / (count - 1).clamp(min=1) + eps).sqrt()
    out = out if shift_mean else out + mean
    out = out if clip is None else out.clamp(-clip, clip)
    return torch.where(mask, out, torch.zeros_like(out)).float()


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
    """See `megarl.ops.loss.policy_loss`."""
    s, zero = settings, torch.zeros_like(logprobs)

    def unmasked(x: Tensor) -> Tensor:
        return torch.where(loss_mask, x, zero)

    logprobs, old = unmasked(logprobs), unmasked(old_logprobs)
    advantages = unmasked(advantages)
    log_ratio = logprobs - old
    if s.ratio == "sequence":
        assert cu_seqlens is not None
        lengths = cu_seqlens.diff().long()
        segment = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        total = zero.new_zeros(len(lengths)).index_add(0, segment, log_ratio)
        count = zero.new_zeros(len(lengths)).index_add(0, segment, loss_mask.to(zero.dtype))
        log_ratio = (total / count.clamp(min=1))[segment]
    bounded = log_ratio.clamp(-20, 20)
    ratio = bounded.exp()
    clipped = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    dual = torch.zeros_like(loss_mask)
    if s.objective == "cispo":
        loss, cut = -advantages * clipped.detach() * logprobs, clipped != ratio
    else:
        cut = -advantages * clipped > -advantages * ratio
        loss = torch.where(cut, -advantages * clipped, -advantages * ratio)
        if s.dual_clip is not None:
            limit = -advantages * s.dual_clip
            dual = (advantages < 0) & (loss > limit)
            loss = torch.where(dual, limit, loss)
    weight, corrected = torch.ones_like(zero), torch.zeros_like(loss_mask)
    if s.correction != "none":
        assert rollout_logprobs is not None
        weight = (old - unmasked(rollout_logprobs)).clamp(-20, 20).exp()
        above, below = weight > s.correction_high, weight < s.correction_low
        if s.correction == "truncate":
            corrected, weight = above, weight.clamp(max=s.correction_high)
        else:
            corrected, weight = above | below, torch.where(above | below, zero, weight)
        loss = loss * weight
    policy, kl = loss, zero
    if s.kl_estimator != "none":
        assert ref_logprobs is not None
        r = unmasked(ref_logprobs) - logprobs
        b = r.clamp(-20, 20)
        kl = {"k1": -r, "k2": r.square() / 2, "k3": b.expm1() - b}[s.kl_estimator]
        loss = loss + s.kl_coef * kl
    if entropy is not None:
        loss = loss - s.entropy_coef * unmasked(entropy)
    loss = unmasked(loss)
    columns = [torch.ones_like(zero), loss, policy, kl, entropy if entropy is not None else zero, ratio]
    columns += [cut & (ratio < 1 - s.clip_low), cut & (ratio > 1 + s.clip_high), dual]
    columns += [bounded.expm1() - bounded, weight, corrected]
    sums = [unmasked(c.to(zero.dtype)).detach().double().sum() for c in columns]
    maxima = [
        unmasked(c).detach().double().amax() if c.numel() else zero.new_zeros((), dtype=torch.float64)
        for c in (ratio, weight)
    ]
    return PolicyLoss(loss, torch.stack([*sums, *maxima]))


def quantize_fp8(weight: Tensor, block: tuple[int, int], values: Tensor, scales: Tensor, given: bool = False) -> None:
    """See `megarl.ops.quantize.quantize_fp8`."""
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [down, rows, across, columns]
    if not given:
        scales.copy_(blocks.abs().amax(dim=(1, 3)).clamp(min=LEAST) / LARGEST)
    scale = scales[:, None, :, None]
    values.copy_((blocks * (1 / scale)).flatten(2, 3).flatten(0, 1)[:rows, :columns])


def quantize_int4(weight: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    """See `megarl.ops.quantize.quantize_int4`."""
    groups = weight.float().unflatten(1, (-1, group))  # [rows, groups, columns]
    scale = (groups.abs().amax(dim=2) / INT4_STEPS).bfloat16()
    scales.copy_(scale.where(scale != 0, torch.finfo(torch.bfloat16).eps))
    quotient = (groups / scales.float()[..., None]).round().nan_to_num(0).clamp(-INT4_ZERO, INT4_ZERO - 1)
    numbers = (quotient + INT4_ZERO).flatten(1).long().unflatten(1, (-1, 8))
    words = (numbers << torch.arange(0, 32, 4)).sum(dim=2)
    codes.copy_(torch.where(words >= 2**31, words - 2**32, words))
