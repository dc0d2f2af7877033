"""The expected times against figures worked out by hand, and laws that hold on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl import cli
from megarl.actor.batch.balance import SequenceCost
from megarl.actor.sizes.parameter_counts import count_parameters
from megarl.config import Config
from megarl.families import read_config
from megarl.preflight import report
from megarl.preflight.roofline import StepEstimate, decode_speed, estimate_step, limits_rollout, times_of
from megarl.preflight.trainer_work import TrainerWork

BIG = "grpo_70b"


def step(name: str, *overrides: str) -> StepEstimate:
    config = cli.composed([f"+experiment={name}", *overrides])
    return estimate_step(config, read_config(str(report.folder_of(config.actor.path))))


def seconds(found: StepEstimate, name: str) -> float:
    (stage,) = [s for s in (*found.rollout, *found.train, *found.sync) if s.name == name]
    return stage.seconds


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-7B-Instruct"])
def test_a_token_costs_two_flops_a_weight(name: str) -> None:
    model = read_config(str(report.folder_of(name)))
    looked_up = model.vocab_size * model.hidden_size  # the input embeddings are no product
    assert SequenceCost.of(model).linear == pytest.approx(2 * (count_parameters(model) - looked_up), rel=0.001)


def test_the_experts_that_no_token_visits_cost_nothing() -> None:
    model = read_config(str(report.folder_of("Qwen/Qwen3-235B-A22B")))
    looked_up = model.vocab_size * model.hidden_size
    assert SequenceCost.of(model).linear / 2e9 == pytest.approx(22.2 - looked_up / 1e9, abs=0.5)  # its page: A22B


def test_an_update_takes_the_time_of_its_flops_on_the_slowest_stage() -> None:
    # 2048 sequences of 2304 tokens, 69.5B weights in products, attention 2 x 80 x 8192 a pair; forward and backward.
    # The last of four stages has 20 of 80 layers and the head.
    forward = 2048 * (2 * 69.503e9 * 2304 + 2 * 80 * 8192 * 2304**2)
    head = 2048 * 2304 * 2 * 8192 * 128256
    slowest = (forward - head) / 4 + head
    microbatches = 512 // 2 * 2304 // 9216
    by_hand = 3 * slowest * (1 + 3 / microbatches) / (16 * 989e12 * 0.35)
    assert seconds(step(BIG), "update") == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("name", [BIG, "grpo_moe_235b"])
def test_quantised_servers_read_fewer_bytes_for_the_weights(name: str) -> None:
    """Linear layers and experts have a byte a weight and a float32 a block; head and embeddings stay in 16 bits."""
    plain = cli.composed([f"+experiment={name}"])
    model = read_config(str(report.folder_of(plain.actor.path)))
    quantised = replace(plain, server=replace(plain.server, quantization="fp8"))
    before, after = decode_speed(plain, model), decode_speed(quantised, model)
    per_rank = plain.cluster.gpu_memory_gb_s * 1e9 * plain.cluster.decode_utilisation * plain.server.tp_size
    whole = 2 * 2 * model.vocab_size * model.hidden_size / per_rank
    linear = (before.weights_s - whole) * (1 + 4 / 128**2) / 2
    assert before.weights_s / 2 < after.weights_s < before.weights_s
    if name == BIG:  # others have routers, which stay as they are
        assert after.weights_s == pytest.approx(linear + whole, rel=0.01)
    assert after.experts_s == pytest.approx(before.experts_s * (1 + 4 / 128**2) / 2)
    assert after.step(8, 4096) < before.step(8, 4096)
    assert replace(after, weights_s=before.weights_s, experts_s=before.experts_s) == before


def test_a_decode_step_reads_the_weights_and_every_cache_once() -> None:
    found = step(BIG, "rollout.max_connections=4")  # one completion a server
    weights, cache = 70.6e9 * 2 / 8, (256 + 1024) * 2 * 80 * 128 * 2
    reduces = 160 * (1e-5 + 2 * 7 / 8 * 8192 * 2 / 450e9)  # two a layer, of a vector of 8192
    by_hand = 512 * 2048 * ((weights + cache) / (3350e9 * 0.5) + reduces)
    assert found.under_way == 1
    assert seconds(found, "decode") == pytest.approx(by_hand, rel=0.01)
    assert step(BIG).under_way == 512
    assert seconds(step(BIG), "decode") < by_hand / 100  # many completions share the reading


def test_few_completions_read_few_experts() -> None:
    config: Config = cli.composed(["+experiment=grpo_moe_235b"])
    model = read_config(str(report.folder_of(config.actor.path)))
    speed = decode_speed(config, model)
    fixed = speed.reduce_s + speed.reduced_s
    one = (speed.step(1, 0.0) - fixed) * 3350e9 * 0.5
    many = (speed.weights_s + speed.experts_s) * 3350e9 * 0.5
    assert many * 8 == pytest.approx(2 * count_parameters(model), rel=0.01)
    assert one * 8 / 2e9 == pytest.approx(22.2, abs=1)


@pytest.mark.parametrize(
    ("faster", "stage", "factor"),
    [
        ("cluster.gpu_tflops=1978", "update", 2.0),
        ("cluster.train_utilisation=0.7", "log-probs", 2.0),
        ("cluster.gpu_memory_gb_s=6700", "decode", 1.77),  # all-reduces stay as they are
        (
            "parallel.dp_size=4",
            "log-probs",
            1.977,
        ),  # as many GPUs more; each has fewer microbatches to fill the pipeline
        ("server.n_servers=8", "prefill", 2.0),
    ],
)
def test_doubling_the_resource_that_limits_a_stage_halves_its_time(faster: str, stage: str, factor: float) -> None:
    few = "rollout.max_connections=64"  # 16 a server: decoding waits for the memory; of 512 as much for the products
    before, after = step(BIG, few), step(BIG, few, faster)
    assert seconds(before, stage) / seconds(after, stage) == pytest.approx(factor, rel=0.01)


def test_servers_that_sample_ahead_hide_the_shorter_side() -> None:
    apart, beside = step("grpo_1_5b", "rollout.max_head_offpolicyness=0"), step("grpo_1_5b")
    assert apart.step_s == pytest.approx(apart.rollout_s + apart.train_s)
    assert beside.step_s == pytest.approx(max(beside.rollout_s, beside.train_s))
    assert beside.bottleneck == "the trainer"
    assert replace(beside, train=[]).bottleneck == "the servers"


def test_scoring_beside_a_sync_hides_the_shorter_of_both_from_the_trainer() -> None:
    def estimate(sync_s: float, beside: str) -> StepEstimate:
        config = cli.composed(["+experiment=grpo_1_5b", f"reshard.overlap_scoring={beside}"])
        return estimate_step(config, read_config(str(report.folder_of(config.actor.path))), sync_s)

    config = cli.composed(["+experiment=grpo_1_5b"])
    work = TrainerWork.of(config, read_config(str(report.folder_of(config.actor.path))))
    scoring = times_of(config, work).scored_s
    assert scoring > seconds(step("grpo_1_5b"), "log-probs")  # with its exchanges between stages
    for sync_s, hidden_s in ((scoring / 2, scoring / 2), (2 * scoring, scoring)):
        in_turn, beside = estimate(sync_s, "false"), estimate(sync_s, "true")
        assert in_turn.bottleneck == beside.bottleneck == "the trainer"
        by_trainer = in_turn.step_s - hidden_s
        assert beside.step_s == pytest.approx(max(by_trainer, beside.rollout_s + sync_s))
        assert beside.step_s < in_turn.step_s


def test_virtual_stages_shorten_the_pipelines_bubble() -> None:
    assert seconds(step(BIG, "parallel.vpp_size=2"), "update") < seconds(step(BIG), "update")


def test_supervised_runs_train_only() -> None:
    found = step("sft_8b")
    assert (found.rollout, found.sync, found.rollout_s) == ([], [], 0.0)
    assert found.tokens_per_s == pytest.approx(128 * 2048 / found.step_s)
    online = step("dpo_8b", "reference.mode=online")
    assert [stage.name for stage in online.train] == ["log-probs", "update", "communication"]
    assert [stage.name for stage in step("dpo_8b").train] == ["update", "communication"]  # taken before the first step


def test_connections_that_starve_the_servers_are_named_with_a_number_that_does_not() -> None:
    config = cli.composed(["+experiment=grpo_70b", "rollout.max_connections=64"])
    model = read_config(str(report.folder_of(config.actor.path)))
    said = limits_rollout(config, model)
    assert said is not None
    enough = said.rpartition(" ")[2]
    config = cli.composed(["+experiment=grpo_70b", f"rollout.max_connections={enough}"])
    assert limits_rollout(config, model) is None


def test_the_longest_completion_decodes_on_alone_unless_servers_sample_ahead() -> None:
    alone = next(stage for stage in step(BIG).rollout if stage.name == "longest")
    assert alone.how.startswith("2,048 steps of ")  # of 4,096 tokens, half of which the mean has
    weights_s = 70.55e9 * 2 / 8 / (3350e9 * 0.5) + 160e-5  # bytes of a rank over its bandwidth, and all-reduces
    assert alone.seconds == pytest.approx(2048 * weights_s, rel=0.02)
    ahead = next(stage for stage in step(BIG, "rollout.max_head_offpolicyness=1").rollout if stage.name == "longest")
    assert ahead.seconds == 0
