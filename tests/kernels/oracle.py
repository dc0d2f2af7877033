"""Slow float64 references in numpy, written from the definitions; and guarded buffers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCABS = (1, 7, 31, 33, 1000, 4097, 32000, 50257, 151936)


class Guarded:
    """A tensor prefilled with NaN (0xFF bytes) between guard bytes; `check` detects writes outside of it.

    With guard=0xFF a read outside gives NaN.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu", guard: int = 0xA5
    ):
        size = math.prod(shape) * dtype.itemsize
        self.guard = guard
        self.raw = torch.full((size + 128,), guard, dtype=torch.uint8, device=device)
        self.raw[64 : 64 + size] = 0xFF  # NaN in every float type
        self.size = size
        self.tensor = self.raw[64 : 64 + size].view(dtype).view(shape)

    def check(self) -> Tensor:
        assert bool((self.raw[:64] == self.guard).all()), "written before the buffer"
        assert bool((self.raw[64 + self.size :] == self.guard).all()), "written past the buffer"
        return self.tensor


def logprob_oracle(
    logits: Tensor, labels: Tensor, valid: int, temperature: Any = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes log-prob [T], entropy [T] and probabilities [T, valid], by exp and log of long doubles."""
    x = logits[:, :valid].double().numpy().astype(np.longdouble)
    temperature = np.asarray(temperature, dtype=np.longdouble).reshape(-1, 1)
    with np.errstate(all="ignore"):
        x = x / temperature
        shifted = np.exp(x - x.max(axis=1, keepdims=True))
        p = shifted / shifted.sum(axis=1, keepdims=True)
        log_p = x - x.max(axis=1, keepdims=True) - np.log(shifted.sum(axis=1, keepdims=True))
        entropy = -np.where(p > 0, p * log_p, np.where(np.isnan(p), np.nan, 0)).sum(axis=1)
    y = labels.numpy()
    logprob = np.where(y < 0, 0, log_p[np.arange(len(y)), np.maximum(y, 0)])
    return logprob.astype(float), np.where(y < 0, 0, entropy).astype(float), p.astype(float)


def logprob_grad_oracle(
    logits: Tensor, labels: Tensor, valid: int, g: Tensor, h: Tensor, temperature: Any = 1.0
) -> np.ndarray:
    """Computes d(sum g logprob + h entropy)/d logits [T, V] by d logprob_y = 1{y} - p, d H = -p (log p + H)."""
    _, entropy, p = logprob_oracle(logits, labels, valid, temperature)
    temperature = np.broadcast_to(np.asarray(temperature, dtype=float), (len(p),))
    out = np.zeros(tuple(logits.shape))
    for t, y in enumerate(labels.tolist()):
        if y < 0:
            continue
        log_p = np.log(np.where(p[t] > 0, p[t], 1.0))
        row = float(h[t]) * -p[t] * (log_p + entropy[t]) - float(g[t]) * p[t]
        row[y] += float(g[t])
        out[t, :valid] = row / temperature[t]
    return out


def gae_oracle(
    rewards: Tensor, values: Tensor, mask: Tensor, cu: Tensor, gamma: float, lam: list[float], bootstrap: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Computes A_t = sum_l (gamma lambda)^l delta_{t+l} over the unmasked tokens of each sequence."""
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for b, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
        steps = [t for t in range(begin, end) if mask[t]]
        v = [float(values[t]) for t in steps] + [bootstrap[b]]
        delta = [float(rewards[t]) + gamma * v[i + 1] - v[i] for i, t in enumerate(steps)]
        for i, t in enumerate(steps):
            advantages[t] = sum((gamma * lam[b]) ** k * d for k, d in enumerate(delta[i:]))
            returns[t] = advantages[t] + v[i]
    return advantages, returns


def group_oracle(rewards: np.ndarray, ids: list[int], mode: str, eps: float, each: bool) -> np.ndarray:
    """Computes advantages from a list of each group's members; `each` normalises the columns before their sum."""
    columns = rewards.astype(float) if each else rewards.astype(float).sum(axis=1, keepdims=True)
    out = np.zeros(len(rewards))
    for i, group in enumerate(ids):
        others = [j for j, other in enumerate(ids) if other == group and j != i]
        if not others:
            continue
        for c in range(columns.shape[1]):
            values = columns[[*others, i], c]
            if mode == "leave_one_out":
                out[i] += columns[i, c] - columns[others, c].mean()
            elif mode == "mean":
                out[i] += columns[i, c] - values.mean()
            else:
                out[i] += (columns[i, c] - values.mean()) / (values.std(ddof=1) + eps)
    return out
