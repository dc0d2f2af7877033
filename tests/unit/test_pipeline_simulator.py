"""The simulator of benchmarks/pipeline.py against steps worked out by hand, its rules, and published steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipeline import FAILURES, in_mode, log_normal, lost_to_failures, sampled
from pipeline_simulator import Result, Setup, Simulation
from published_throughput import CASES, GOAL, Published

from megarl.knobs import UserError
from megarl.preflight.roofline import DecodeSpeed

STEP_S = 0.01
SETUP = Setup(
    prompts=8,
    samples=2,
    prompt_tokens=10,
    lengths=lambda rng, count: np.full(count, 100),
    speed=DecodeSpeed(STEP_S, 0, 0, 0, 0, 0, 0, 0),
    servers=4,
    server_gpus=1,
    slots=4,
    prefill_s=0.0,
    trainer_gpus=4,
    train_s=1 / (16 * 110),  # a batch of 16 x 110 tokens takes a second
    sync_s=0.25,
)
EVEN, LONG = 1.0, 2.0  # seconds that servers need for a batch of 100 tokens, and with one of 200


def one_long(rng: np.random.Generator, count: int) -> np.ndarray:
    lengths = np.full(count, 100)
    lengths[:1] = 200
    return lengths


def test_in_turn_a_step_is_the_sum_of_its_parts() -> None:
    found = Simulation(in_mode(SETUP, "in turn", 0.0)).run()
    assert found.step_s == pytest.approx(EVEN + 1 + 0.25)
    assert found.tokens_per_s == pytest.approx(16 * 110 / found.step_s / 8)
    assert found.trainer_idle == pytest.approx(1.25 / 2.25)
    assert found.server_idle == pytest.approx(1.25 / 2.25)
    assert (found.sync_s, found.oldest) == (pytest.approx(0.25), 0)


def test_shared_gpus_train_and_sample_on_all_of_them() -> None:
    found = Simulation(in_mode(SETUP, "shared", 0.5)).run()
    assert found.step_s == pytest.approx(1.0 + 0.5 + 0.5 + 0.25 + 0.5)  # sample, swap, train by half, sync, swap
    assert found.tokens_per_s == pytest.approx(16 * 110 / found.step_s / 8)


def test_overlapped_a_step_is_the_longer_side_and_the_sync() -> None:
    found = Simulation(in_mode(replace(SETUP, train_s=3 * SETUP.train_s), "overlapped", 0.0)).run()
    assert found.step_s == pytest.approx(3 + 0.25)
    assert found.oldest == 1


def test_a_sync_hides_in_the_tail_of_generation() -> None:
    """Three servers take their weights and the next batch while the fourth decodes its last completion."""
    quick = replace(SETUP, lengths=one_long, train_s=SETUP.train_s / 10)
    found = Simulation(in_mode(quick, "overlapped", 0.0)).run()
    assert EVEN + 0.25 < found.step_s < LONG + 0.25  # which each batch would take if all servers waited
    assert found.oldest == 1


def test_partial_rollouts_keep_servers_busy_and_no_token_older_than_the_bound() -> None:
    spread = replace(SETUP, lengths=log_normal(100, 400, 0.99), train_s=SETUP.train_s / 2)
    steps = {
        mode: Simulation(in_mode(spread, mode, 0.0)).run(steps=40) for mode in ("in turn", "overlapped", "partial")
    }
    assert steps["partial"].step_s < steps["overlapped"].step_s < steps["in turn"].step_s
    assert [steps[mode].oldest for mode in ("in turn", "overlapped")] == [0, 1]
    assert 1 <= steps["partial"].oldest <= 2
    assert steps["partial"].server_idle < steps["overlapped"].server_idle


def test_a_retracted_cache_is_computed_again_and_one_kept_in_place_is_not() -> None:
    slow = replace(SETUP, prefill_s=1e-3, lengths=one_long, train_s=SETUP.train_s / 10)
    retract = Simulation(in_mode(slow, "partial", 0.0)).run()
    in_place = Simulation(replace(in_mode(slow, "partial", 0.0), keeps_cache=True)).run()
    assert retract.step_s > in_place.step_s


@pytest.mark.parametrize(("score", "exposed"), [(0.1, 0.15), (0.25, 0.0), (0.5, 0.0)])
def test_scoring_beside_the_sync_hides_the_shorter_of_both(score: float, exposed: float) -> None:
    """The trainer is the slower side: 3 s a step, of which `score` before the update, and a sync of 0.25 s."""
    slow = replace(SETUP, train_s=3 * SETUP.train_s, score_s=score * SETUP.train_s)
    found, in_turn = (Simulation(in_mode(slow, mode, 0.0)).run() for mode in ("scoring", "partial"))
    assert (in_turn.step_s, in_turn.exposed_s) == (pytest.approx(3 + 0.25), pytest.approx(0.25))
    assert found.step_s == pytest.approx(3 + 0.25 - min(score, 0.25))
    assert (found.sync_s, found.exposed_s) == (pytest.approx(0.25), pytest.approx(exposed))
    assert found.trainer_idle == pytest.approx((0.25 - min(score, 0.25)) / found.step_s, abs=1e-6)
    assert found.oldest <= 2


def test_scoring_waits_for_a_batch_that_is_not_complete_when_the_sync_begins() -> None:
    quick = replace(SETUP, train_s=SETUP.train_s / 10, score_s=SETUP.train_s / 20)  # servers are the slower side
    found, in_turn = (Simulation(in_mode(quick, mode, 0.0)).run() for mode in ("scoring", "partial"))
    assert found.step_s == pytest.approx(in_turn.step_s)
    assert found.exposed_s == pytest.approx(in_turn.exposed_s) == pytest.approx(0.25)


@pytest.mark.parametrize("mode", ["in turn", "overlapped", "partial", "scoring"])
def test_a_server_that_dies_costs_time_and_no_prompt(mode: str) -> None:
    chosen = in_mode(SETUP, mode, 0.0)
    calm = Simulation(chosen).run(steps=8, warm=0)
    simulation = Simulation(chosen, deaths=((0.55, 0, 3.0), (4.1, 2, 1.0)))
    found = simulation.run(steps=8, warm=0)
    assert found.lost > 0
    assert found.step_s > calm.step_s
    assert len(simulation.steps) == 8
    assert all(tokens == pytest.approx(16 * 110) for _, tokens in simulation.steps)  # each batch whole, none twice


def test_a_memory_bound_step_grows_with_the_cache() -> None:
    speed = DecodeSpeed(0.01, 0.02, 0.5, 1e-6, 1e-4, 0.0, 1e-3, 1e-5)
    assert speed.step(2, 1000) == pytest.approx(0.01 + 0.02 * 0.75 + 1e-3 + 1e-3 + 2e-5)
    assert speed.step(1000, 0) == pytest.approx(0.1 + 1e-3 + 1e-2)  # by its products


@pytest.mark.parametrize(("mean", "sigma"), [(500, 0.5), (2048, 0.99), (3800, 0.99)])
def test_lengths_have_the_mean_after_the_cut(mean: int, sigma: float) -> None:
    lengths = log_normal(mean, 4096, sigma)(np.random.default_rng(0), 50_000)
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert 1 <= lengths.min() < lengths.max() == 4096


def test_lengths_of_a_run_are_scaled_to_the_mean(tmp_path: Path) -> None:
    file = tmp_path / "step-000001.jsonl"
    file.write_text("".join(json.dumps({"completion": "x" * count}) + "\n" for count in (10, 20, 30)))
    lengths = sampled(file, 200, 250)(np.random.default_rng(0), 1000)
    assert set(lengths) == {100, 200, 250}  # 300 is cut
    file.write_text(json.dumps({"completion": ""}) + "\n")
    with pytest.raises(UserError, match="has no completions"):
        sampled(file, 200, 250)


def test_failures_cost_half_an_interval_of_checkpoints_and_the_restart() -> None:
    trainer = replace(SETUP, trainer_gpus=4, servers=0)
    result = Result(100.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    lost = lost_to_failures(trainer, result, 10_000, saved_every=10, restart_s=600, seed=0)
    assert lost == pytest.approx(10_000 * FAILURES * (500 + 600), rel=0.25)
    assert lost_to_failures(trainer, result, 100, saved_every=10, restart_s=600, seed=0) < lost / 20


@pytest.mark.parametrize("case", [case for case in CASES if case.staleness < 8], ids=lambda case: case.name)
def test_a_published_step_is_reproduced_within_a_quarter(case: Published) -> None:
    assert case.simulated().step_s == pytest.approx(case.step_s, rel=GOAL)
