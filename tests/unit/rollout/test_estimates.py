"""Estimates of evaluations against brute force and published values."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.knobs import UserError
from megarl.rollout.estimates import bootstrap, mean_of, pass_at_k, wilson
from megarl.rollout.evaluate import EvaluatorConfig


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations(range(samples), k))
        hits = sum(any(index < right for index in subset) for subset in subsets)
        assert pass_at_k(samples, right, k) == pytest.approx(hits / len(subsets), abs=1e-15)


def test_pass_at_k_has_no_bias_where_the_plain_estimate_has() -> None:
    chance, samples, k = 0.2, 10, 5
    outcomes = [
        (math.comb(samples, right) * chance**right * (1 - chance) ** (samples - right), right)
        for right in range(samples + 1)
    ]
    true = 1 - (1 - chance) ** k
    assert sum(p * pass_at_k(samples, right, k) for p, right in outcomes) == pytest.approx(true, abs=1e-12)
    assert sum(p * (1 - (1 - right / samples) ** k) for p, right in outcomes) < true - 0.03


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples of a problem, got 2"):
        pass_at_k(2, 1, 3)
    with pytest.raises(UserError, match=r"pass@8 needs at least 8 samples .* evaluator.n_samples=4; raise it"):
        EvaluatorConfig(n_samples=4, pass_at=[1, 8])


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_the_published_one(right: int, trials: int, low: float, high: float) -> None:
    assert wilson(right, trials, 0.95) == pytest.approx((low, high), abs=5e-5)
    assert wilson(trials - right, trials, 0.95) == pytest.approx((1 - high, 1 - low), abs=5e-5)


@given(st.integers(1, 500), st.data())
def test_wilsons_interval_holds_the_share_and_stays_within_0_and_1(trials: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, trials))
    low, high = wilson(right, trials, 0.9)
    assert 0 <= low <= right / trials + 1e-12
    assert right / trials - 1e-12 <= high <= 1
    assert low < high


def test_the_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        values = generator.choice([0.0, 0.25, 0.5, 1.0], size=40, p=[0.3, 0.2, 0.2, 0.3]).tolist()
        low, high = bootstrap(values, 0.9)
        covered += low <= 0.45 <= high
    assert 165 <= covered <= 195  # 180 expected of a 90% interval; 3.5 standard deviations


def test_the_bootstrap_is_the_same_again_and_as_wide_as_the_standard_error_says() -> None:
    values = [0.0, 0.25, 0.5, 0.75, 1.0] * 40
    low, high = bootstrap(values, 0.95)
    assert (low, high) == bootstrap(values, 0.95)
    error = statistics.pstdev(values) / len(values) ** 0.5
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_the_method_of_an_interval_is_wilson_for_0_and_1_and_bootstrap_otherwise() -> None:
    assert mean_of([0.0, 1.0, 1.0], 0.95).method == "wilson"
    assert mean_of([0.0, 0.5, 1.0], 0.95).method == "bootstrap"
    assert math.isnan(mean_of([], 0.95).value)
