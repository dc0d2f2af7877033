"""Estimates from samples of problems, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
SEED = 0  # of the resampling: equal samples give equal intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its confidence interval; `method` is `wilson` or `bootstrap`."""

    value: float
    low: float
    high: float
    method: str


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of `k` samples is right, without bias, from `samples` of which `right` are right.

    1 - C(samples - right, k) / C(samples, k): Chen et al., https://arxiv.org/abs/2107.03374, equation 1. The plain
    estimate 1 - (1 - right/samples)^k is too low.

    Raises:
        ValueError: k is not between 1 and `samples`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a problem, got {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson(right: float, trials: int, confidence: float) -> tuple[float, float]:
    """Interval of a share of `right` in independent `trials`: Wilson, JASA 22 (1927), p. 209, the score interval.

    It stays within 0 and 1, and has a width where the share is 0 or 1.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = right / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def bootstrap(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Percentile interval of the mean of `values`, from means of `RESAMPLES` draws with replacement."""
    array, generator = np.asarray(values, np.float64), np.random.default_rng(SEED)
    at_once = max(1, 2**20 // len(array))  # resamples, to bound memory
    means = [
        array[generator.integers(0, len(array), (min(at_once, RESAMPLES - start), len(array)))].mean(axis=1)
        for start in range(0, RESAMPLES, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def mean_of(values: Sequence[float], confidence: float) -> Estimate:
    """Mean of one value per problem. Wilson's interval if each is 0 or 1, else the bootstrap over problems.

    Samples of one problem are not independent, so problems are resampled, never samples. Without a problem, all is NaN.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan, "wilson")
    mean = math.fsum(values) / len(values)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson(math.fsum(values), len(values), confidence), "wilson")
    return Estimate(mean, *bootstrap(values, confidence), "bootstrap")
