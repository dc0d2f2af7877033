"""Plain-torch twins of the operations: the same names and results, no kernels. For reading, tests and debugging.

They take the whole vocabulary and all tokens (no process groups), run on any device and differentiate by autograd.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megarl.ops.advantage import Aggregation, GroupMode
from megarl.ops.attention import Sequences
from megarl.ops.index import TokenIndex
from megarl.ops.linear import TokenLossFn
from megarl.ops.loss import PolicyLoss, PolicyLossSettings


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_valid: int,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `megarl.ops.logprob.vocab_parallel_logprobs`; the whole vocabulary is here."""
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


def gather_logprobs(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """See `megarl.ops.logprob.gather_logprobs`."""
    return gather_logprobs_entropy(logits, labels, temperature)[0]


def gather_logprobs_entropy(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """See `megarl.ops.logprob.gather_logprobs_entropy`."""
    vocab = logits.shape[-1]
    if isinstance(temperature, Tensor) and temperature.numel() > 1:
        temperature = temperature.expand(labels.shape).reshape(-1)
    logprob, entropy = vocab_parallel_logprobs(
        logits.reshape(-1, vocab),
        labels.reshape(-1),
        vocab_valid=vocab,
        temperature=temperature,
        with_entropy=True,
    )
    assert entropy is not None
    return logprob.view(labels.shape), entropy.view(labels.shape)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_valid: int,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See `megarl.ops.logprob.linear_logprobs`; here all logits are held."""
    return vocab_parallel_logprobs(
        hidden @ weight.t(), labels, vocab_valid=vocab_valid, temperature=temperature, with_entropy=with_entropy
    )


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_fn: TokenLossFn,
    *,
    vocab_valid: int,
    temperature: float | Tensor = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megarl.ops.logprob.linear_token_loss`; here all logits are held and `loss_fn` is called once."""
    logprob, entropy = linear_logprobs(
        hidden, weight, labels, vocab_valid=vocab_valid, temperature=temperature, with_entropy=with_entropy
    )
    rows = (labels != -1).nonzero().squeeze(1)
    loss = loss_fn(logprob[rows], entropy[rows] if entropy is not None else None, rows).sum()
    return loss, logprob.detach(), entropy.detach() if entropy is not None else None


def build_index(
    input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor | None = None, *, cp_rank: int = 0, cp_size: int = 1
) -> TokenIndex:
    """See `megarl.ops.index.build_index`."""
    labels, positions, segments = [], [], []
    bounds = cu_seqlens.tolist()
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        label = torch.full((end - begin,), -1, dtype=torch.int64)
        if end > begin:
            keep = loss_mask[begin + 1 : end] if loss_mask is not None else torch.ones(end - begin - 1).bool()
            label[:-1] = torch.where(keep, input_ids[begin + 1 : end], -1)
        position = torch.arange(begin, end)
        if cp_size > 1:
            chunks = position.view(2 * cp_size, -1)
            position = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
        labels.append(label[position - begin])
        positions.append(position)
        segments.append(torch.full_like(position, number))
    empty = torch.empty(0, dtype=torch.int64)
    label = torch.cat([empty, *labels])
    rows = (label >= 0).nonzero().squeeze(1)
    padded = torch.full_like(label, -1)
    padded[: rows.numel()] = rows
    return TokenIndex(
        label, torch.cat([empty, *positions]), torch.cat([empty, *segments]), padded, torch.tensor([rows.numel()])
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
    """See `megarl.ops.advantage.gae_packed`; here a loop over time."""
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
    kept = x[mask].double()
    mean = kept.mean() if kept.numel() else kept.new_zeros(())
    return torch.stack([kept.new_tensor(float(kept.numel())), mean, (kept - mean).square().sum()])


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

    def kept(x: Tensor) -> Tensor:
        return torch.where(loss_mask, x, zero)

    logprobs, old = kept(logprobs), kept(old_logprobs)
    advantages = kept(advantages)
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
        weight = (old - kept(rollout_logprobs)).clamp(-20, 20).exp()
        above, below = weight > s.correction_high, weight < s.correction_low
        if s.correction == "truncate":
            corrected, weight = above, weight.clamp(max=s.correction_high)
        else:
            corrected, weight = above | below, torch.where(above | below, zero, weight)
        loss = loss * weight
    policy, kl = loss, zero
    if s.kl_estimator != "none":
        assert ref_logprobs is not None
        r = kept(ref_logprobs) - logprobs
        b = r.clamp(-20, 20)
        kl = {"k1": -r, "k2": r.square() / 2, "k3": b.expm1() - b}[s.kl_estimator]
        loss = loss + s.kl_coef * kl
    if entropy is not None:
        loss = loss - s.entropy_coef * kept(entropy)
    loss = kept(loss)
    columns = [torch.ones_like(zero), loss, policy, kl, entropy if entropy is not None else zero, ratio]
    columns += [cut & (ratio < 1 - s.clip_low), cut & (ratio > 1 + s.clip_high), dual]
    columns += [bounded.expm1() - bounded, weight, corrected]
    sums = [kept(c.to(zero.dtype)).detach().double().sum() for c in columns]
    maxima = [
        kept(c).detach().double().amax() if c.numel() else zero.new_zeros((), dtype=torch.float64)
        for c in (ratio, weight)
    ]
    return PolicyLoss(loss, torch.stack([*sums, *maxima]))


def add_rms_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `megarl.ops.decode.add_rms_norm`; without `update` also `megarl.ops.layer.rms_norm`."""
    if update is not None:
        residual += update
    return residual * (residual.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `megarl.ops.decode.rotate_and_store`. Leaves `qkv` as it is."""
    _, kv_heads, dim = keys.shape
    q, k, v = qkv.view(len(qkv), -1, dim).tensor_split([-2 * kv_heads, -kv_heads], dim=1)

    def rotated(heads: Tensor, norm: Tensor | None) -> Tensor:
        return rotate(heads if norm is None else add_rms_norm(heads, None, norm, eps), cos_sin[positions])

    keys[slots], values[slots] = rotated(k, k_norm), v
    return rotated(q, q_norm)


def paged_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    requests: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """See `megarl.ops.decode.paged_attention`."""
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
        slots = table[request, max(0, position + 1 - window) if window else 0 : position + 1].long()
        k, v = (cache[slots].float().transpose(0, 1) for cache in (keys, values))
        q = queries[row].float().view(len(k), -1, queries.shape[2])
        weights = (q @ k.transpose(1, 2) * scale).softmax(-1)
        out[row] = (weights @ v).flatten(0, 1)
    return out


def packed_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """See `megarl.ops.attention.packed_attention`."""
    out = torch.zeros_like(query)
    bounds = sequences.cu_seqlens.tolist()
    for begin, end, skipped in zip(bounds, bounds[1:], sequences.skipped.tolist(), strict=False):
        rows = sequences.rows[begin:end]
        q = query[rows[skipped:]].transpose(0, 1)
        k, v = (x[rows].transpose(0, 1).repeat_interleave(len(q) // x.shape[1], 0) for x in (key, value))
        later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)[skipped:]
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(later, float("-inf")).softmax(-1)
        out = out.index_put((rows[skipped:],), (weights @ v).transpose(0, 1))
    return out


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """See `megarl.ops.layer.rotate`."""
    (low, high), (cos, sin) = x.chunk(2, -1), cos_sin[:, None].chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `megarl.ops.decode.silu_mul` and `megarl.ops.layer.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """See `megarl.ops.decode.sample`. In float64; leaves `logits` as they are."""
    logprobs = (logits.double() / temperature[:, None]).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    tokens = (cumulative > uniform[:, None] * cumulative[:, -1:]).int().argmax(-1)
    return tokens.int(), logprobs.gather(1, tokens[:, None])[:, 0].float()
