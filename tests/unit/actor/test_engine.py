"""The engine in one process: GRPO equals plain torch, user losses, exact resume, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.actor.api import FinetuneSpec
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.policy import MegatronPPOActor
from megarl.actor.rollout_mismatch import rollout_mismatch
from megarl.actor.supervised import MegatronLMEngine, trained_tokens
from megarl.actor.weights import hf_files, hf_weights
from megarl.algorithms import GRPO, GRPOConfig
from megarl.knobs import UserError
from megarl.ops.logprob import gather_logprobs
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch, cu_seqlens_of

pytestmark = pytest.mark.usefixtures("world_of_one")

LENGTHS = [9, 14, 7, 21, 11, 6, 16, 12]


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3", tied=True, vocab_size=343)


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    optimizer = OptimizerConfig(**fields.pop("optimizer", {"lr": 1e-3, "clip_grad": 0.0}))
    return EngineConfig(path=str(folder), optimizer=optimizer, **fields)


def rollout(seed: int = 0) -> PackedBatch:
    """Two groups of four completions, with rewards and log-probs of a slightly different policy."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    prompts = torch.tensor([3, 3, 3, 3, 5, 5, 5, 5]).repeat_interleave(lengths)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    return PackedBatch(
        cu_seqlens_of(lengths),
        {
            "input_ids": torch.randint(0, 343, (total,), generator=generator),
            "loss_mask": position >= prompts,
            "rollout_logprobs": torch.randn(total, generator=generator),
        },
        {
            "rewards": torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1]),
            "group_ids": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        },
    )


def grpo_reference(model: Any, batch: PackedBatch, prox: Tensor, eps_clip: float) -> Tensor:
    """The GRPO loss in plain torch and transformers."""
    rewards = batch["rewards"].view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total, count = torch.zeros([]), 0
    bounds = batch.cu_seqlens.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        ids = batch["input_ids"][start:stop]
        table = torch.log_softmax(model(ids[None]).logits[0], -1)
        logprobs = table[:-1].gather(1, ids[1:, None]).squeeze(1)
        ratio = (logprobs - prox[start + 1 : stop]).exp()
        mask = batch["loss_mask"][start + 1 : stop]
        surrogate = torch.min(ratio * advantages[i], ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages[i])
        total = total - (surrogate * mask).sum()
        count += int(mask.sum())
    return total / count


def gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Collects the last step's gradients under HF names, by gathering them in place of the parameters."""
    weights = [p.detach().clone() for p in hf_weights.parameters(engine.modules)]
    with torch.no_grad():
        for parameter in hf_weights.parameters(engine.modules):
            parameter.copy_(parameter.main_grad)
        by_name = {name: tensor.clone() for name, tensor in engine.named_weights()}
        for parameter, value in zip(hf_weights.parameters(engine.modules), weights, strict=True):
            parameter.copy_(value)
    return by_name


@pytest.mark.parametrize("budget", [1000, 40, 21])
def test_the_gradient_of_grpo_equals_plain_torch(folder: Path, budget: int) -> None:
    actor = MegatronPPOActor(config_of(folder, max_tokens_per_mb=budget), GRPO(GRPOConfig(eps_clip=0.2)))
    actor.initialize()
    batch = rollout()
    noise = 0.3 * torch.randn(batch.total_tokens, generator=torch.Generator().manual_seed(5))
    prox = actor.compute_logp(batch) + noise  # ratios away from 1, some of them clipped
    batch["prox_logp"] = prox
    actor.compute_advantages(batch)
    stats = actor.ppo_update(batch)

    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = grpo_reference(model, batch, prox, 0.2)
    loss.backward()
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert 0.05 < stats["clip_fraction"] < 0.95
    expected = dict(model.named_parameters())
    for name, gradient in gradients(actor).items():
        torch.testing.assert_close(gradient, expected[name].grad, atol=2e-6, rtol=1e-4, msg=name)


def test_the_loss_does_not_depend_on_how_the_batch_is_cut(folder: Path) -> None:
    steps = []
    for budget in (1000, 40, 21):
        engine = MegatronLMEngine(config_of(folder, max_tokens_per_mb=budget))
        engine.initialize()
        steps.append(engine.train_lm(rollout()))
        evaluation = engine.evaluate_lm(rollout())
        assert evaluation["loss"] < steps[-1]["loss"]
    for key in ("loss", "grad_norm", "entropy"):
        assert [step[key] for step in steps] == pytest.approx([steps[0][key]] * 3, rel=1e-5)


def test_metrics_of_microbatches_are_weighted_means_and_maxima(folder: Path) -> None:
    engine = MegatronLMEngine(config_of(folder, max_tokens_per_mb=40))
    engine.initialize()
    trained: list[int] = []

    def loss_fn(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        trained.append(int(trained_tokens(data)))
        mark = torch.tensor(100.0 * trained[-1])
        return (logprobs * data["loss_mask"]).sum(), {"mark": mark, "mark_max": mark, "debt_max": -mark}

    for run in (engine.eval_batch, engine.train_batch):
        trained.clear()
        stats = run(rollout(), loss_fn, trained_tokens, loss_input="logprobs")
        assert len(set(trained)) > 1
        mean = 100 * sum(n * n for n in trained) / sum(trained)
        assert (stats["mark"], stats["mark_max"], stats["debt_max"]) == (
            pytest.approx(mean), 100 * max(trained), -100 * min(trained),
        )  # fmt: skip


def test_a_user_loss_sees_packed_logits(folder: Path) -> None:
    """A REINFORCE loss in the style of AReaL's documents, on a padded batch that the engine packs."""

    def reinforce_loss(logits: Tensor, data: PackedBatch) -> Tensor:
        assert logits.shape == (data["input_ids"].numel(), 343)
        logprobs = gather_logprobs(logits, torch.roll(data["input_ids"], shifts=-1, dims=-1))
        mask = data["loss_mask"].bool()
        return torch.where(mask, -logprobs * data["rewards"], 0.0).sum() / mask.count_nonzero()

    padded = {
        "input_ids": torch.randint(0, 343, (3, 10), generator=torch.Generator().manual_seed(1)),
        "attention_mask": torch.tensor([[1] * 10, [1] * 6 + [0] * 4, [1] * 8 + [0] * 2]).bool(),
        "loss_mask": torch.ones(3, 10).bool(),
        "rewards": torch.rand(3, 10, generator=torch.Generator().manual_seed(2)),
    }
    engine = MegatronEngine(config_of(folder))
    engine.initialize()
    stats = engine.train_batch(padded, reinforce_loss, lambda data: data["loss_mask"].count_nonzero())
    model = AutoModelForCausalLM.from_pretrained(folder)
    packed = PackedBatch.from_padded(padded)
    logits = torch.cat([model(ids[None]).logits[0] for ids in packed["input_ids"].split(packed.lengths.tolist())])
    assert stats["loss"] == pytest.approx(float(reinforce_loss(logits, packed)), rel=1e-5)


def test_gradients_do_not_depend_on_how_often_they_are_accumulated(folder: Path) -> None:
    """A user's loss and weights give the same step over 1, 2 and 7 microbatches."""

    def loss_fn(logits: Tensor, data: PackedBatch) -> Tensor:
        logprobs = gather_logprobs(logits, torch.roll(data["input_ids"], -1))
        inside = data["loss_mask"].index_fill(0, data.cu_seqlens[1:].long() - 1, False)  # last tokens predict nothing
        return -(logprobs * data["advantages"])[inside].mean()

    def weigh(data: PackedBatch) -> Tensor:
        return data["loss_mask"].sum() - data.num_seqs

    lengths = torch.tensor([12, 14, 11, 21, 13, 16, 15])
    generator = torch.Generator().manual_seed(0)
    total = int(lengths.sum())
    batch = PackedBatch(
        cu_seqlens_of(lengths),
        {
            "input_ids": torch.randint(0, 343, (total,), generator=generator),
            "loss_mask": torch.cat([torch.arange(n) >= 4 for n in lengths]),
            "advantages": torch.randn(total, generator=generator),
        },
    )
    results: dict[int, tuple[dict[str, float], dict[str, Tensor]]] = {}  # by number of microbatches
    for budget in (1000, 60, 21):
        engine = MegatronEngine(config_of(folder, max_tokens_per_mb=budget))
        engine.initialize()
        calls: list[int] = []

        def counted(logits: Tensor, data: PackedBatch, calls: list[int] = calls) -> Tensor:
            calls.append(data.num_seqs)
            return loss_fn(logits, data)

        stats = engine.train_batch(batch, counted, weigh)
        results[len(calls)] = stats, gradients(engine)
    assert sorted(results) == [1, 2, 7]
    for stats, step_gradients in results.values():
        assert stats == pytest.approx(results[1][0], rel=1e-5)
        for name, gradient in step_gradients.items():
            torch.testing.assert_close(gradient, results[1][1][name], atol=5e-7, rtol=1e-5, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_kept_or_computed_twice_give_the_same_step(checkpoints: Callable[..., Path], tied: bool) -> None:
    path = checkpoints("qwen3", tied=tied, vocab_size=343)
    results = []
    for megabytes in (0, 256):
        engine = MegatronLMEngine(config_of(path, kept_logits_mb=megabytes))
        engine.initialize()
        batch = rollout()
        all_tokens = engine.logprobs(batch)
        trained = engine.logprobs(batch, trained_only=True)
        torch.testing.assert_close(trained, all_tokens.masked_fill(~batch["loss_mask"], 0.0), atol=1e-6, rtol=0)
        results.append((engine.train_lm(batch), gradients(engine)))
    (chunks, chunk_gradients), (kept, kept_gradients) = results
    assert chunks == pytest.approx(kept, rel=1e-5)
    for name, gradient in chunk_gradients.items():
        torch.testing.assert_close(gradient, kept_gradients[name], atol=1e-6, rtol=1e-5, msg=name)


def test_forward_gives_results_in_the_order_of_the_batch(folder: Path) -> None:
    engine = MegatronEngine(config_of(folder, max_tokens_per_mb=24))
    engine.initialize()
    batch = rollout()
    per_token = engine.eval().forward(batch, lambda logits, mb: mb["input_ids"].float())
    assert torch.equal(per_token, batch["input_ids"].float())
    per_sequence = engine.forward(batch, lambda logits, mb: mb.lengths.float())
    assert per_sequence.tolist() == LENGTHS


def test_training_goes_on_bit_for_bit_from_a_saved_state(folder: Path, tmp_path: Path) -> None:
    schedule = {"lr": 1e-3, "lr_decay_style": "linear", "warmup_steps": 2}
    spec = FinetuneSpec(1, 10, 1)

    def engine_of() -> MegatronLMEngine:
        engine = MegatronLMEngine(config_of(folder, optimizer=schedule))
        engine.initialize(ft_spec=spec)
        return engine

    def steps(engine: MegatronLMEngine, seeds: range) -> list[dict[str, float]]:
        out = []
        for seed in seeds:
            out.append(engine.train_lm(rollout(seed)))
            engine.step_lr_scheduler()
        return out

    straight = engine_of()
    steps(straight, range(3))
    straight.save_state(tmp_path / "state")
    expected = steps(straight, range(3, 6))
    resumed = engine_of()
    resumed.load_state(tmp_path / "state")
    assert steps(resumed, range(3, 6)) == expected
    weights = dict(straight.named_weights())
    for name, tensor in resumed.named_weights():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_every_step_of_a_schedule_moves_and_a_longer_run_goes_on_along_its_own(
    folder: Path, tmp_path: Path, style: str
) -> None:
    def engine_of(steps: int) -> MegatronLMEngine:
        config = config_of(folder, optimizer={"lr": 1e-3, "lr_decay_style": style, "warmup_steps": 2})
        engine = MegatronLMEngine(config)
        engine.initialize(ft_spec=FinetuneSpec(1, steps, 1))
        return engine

    def rates(engine: MegatronLMEngine, count: int) -> list[float]:
        result = []
        for _ in range(count):
            result.append(engine.optimizer.param_groups[0]["lr"])
            engine.step_lr_scheduler()
        return result

    short, long_rates = engine_of(4), rates(engine_of(8), 8)
    assert min(rates(short, 4)) > 0
    assert min(long_rates) > 0
    assert long_rates[:2] == pytest.approx([5e-4, 1e-3])
    short.save_state(tmp_path)
    longer = engine_of(8)
    longer.load_state(tmp_path)
    assert rates(longer, 4) == pytest.approx(long_rates[4:])


def test_bfloat16_parameters_are_trained_on_float32_masters(folder: Path, tmp_path: Path) -> None:
    engine = MegatronLMEngine(config_of(folder, dtype="bfloat16", optimizer={"lr": 1e-3}))
    engine.initialize()
    exact = MegatronLMEngine(config_of(folder))
    exact.initialize()
    batch = rollout()
    assert engine.train_lm(batch)["loss"] == pytest.approx(exact.train_lm(batch)["loss"], rel=0.02)
    engine.save_state(tmp_path)
    expected = [engine.train_lm(rollout(seed)) for seed in (1, 2)]
    resumed = MegatronLMEngine(config_of(folder, dtype="bfloat16", optimizer={"lr": 1e-3}))
    resumed.initialize()
    resumed.load_state(tmp_path)
    assert [resumed.train_lm(rollout(seed)) for seed in (1, 2)] == expected


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_takes_no_step(folder: Path, poison: float) -> None:
    engine = MegatronLMEngine(config_of(folder))
    engine.initialize()
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    stats = engine.train_batch(
        rollout(), lambda lp, ent, data: lp.sum() * poison, lambda data: 1.0, loss_input="logprobs"
    )
    assert stats["skipped_steps"] == 1
    for name, tensor in engine.named_weights():
        assert torch.equal(tensor, before[name])


def test_a_batch_without_a_trained_token_is_refused(folder: Path) -> None:
    engine = MegatronLMEngine(config_of(folder))
    engine.initialize()
    batch = rollout()
    batch["loss_mask"] = torch.zeros(batch.total_tokens, dtype=torch.bool)
    with pytest.raises(UserError, match="at least one token must be trained on"):
        engine.train_lm(batch)


def test_a_random_model_is_the_same_for_the_same_seed(folder: Path) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        engine = MegatronEngine(config_of(folder, init="random", init_seed=seed))
        engine.initialize()
        return {name: tensor.clone() for name, tensor in engine.named_weights()}

    first, second, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert first["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.05)


def test_a_checkpoint_in_several_files_is_read_and_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    engine = MegatronEngine(config_of(tmp_path / "many"))
    engine.initialize()
    monkeypatch.setattr(hf_files, "MAX_FILE_BYTES", 100_000)
    engine.save(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"lacks the tensor model\.norm\.weight"),
        ({"model.extra.weight": torch.ones(2)}, r"has the tensor model\.extra\.weight, unknown to qwen3"),
        ({"model.norm.weight": torch.ones(3)}, r"model\.norm\.weight has shape \(3,\), the config asks for \(64,\)"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    tensors = {**model.state_dict(), **change}
    tensors.pop("lm_head.weight")
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, tmp_path / "model.safetensors")
    engine = MegatronEngine(config_of(tmp_path))
    with pytest.raises(UserError, match=message):
        engine.initialize()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "float8"}, "actor.dtype=float8 must be one of float32, bfloat16"),
        ({"init": "zeros"}, "actor.init=zeros must be one of"),
        ({"max_tokens_per_mb": 0}, "max_tokens_per_mb=0 must be at least 1"),
        ({"temperature": 0.0}, r"temperature=0\.0 must be above 0"),
        ({"optimizer": {"lr_decay_style": "step"}}, "lr_decay_style=step must be one of"),
    ],
)
def test_a_wrong_knob_is_refused(folder: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MegatronEngine(config_of(folder, **fields), ParallelConfig())


def test_mismatch_is_measured_on_trained_tokens_only() -> None:
    batch = rollout()
    batch["prox_logp"] = torch.where(batch["loss_mask"], batch["rollout_logprobs"] + 0.25, 1e6)
    metrics = rollout_mismatch(batch, 3)  # without `versions`, all tokens count as sampled from version 3
    assert metrics["logprob_diff_max"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["logprob_diff_mean"] == pytest.approx(0.25, rel=1e-5)


def test_mismatch_is_of_the_tokens_that_the_trainers_own_version_sampled() -> None:
    batch = rollout()
    old = torch.arange(batch.total_tokens) % 2 == 0
    batch["versions"] = torch.where(old, 2, 3).to(torch.int32)
    batch["prox_logp"] = batch["rollout_logprobs"] + torch.where(old, 4.0, 0.25)
    metrics = rollout_mismatch(batch, 3)
    assert metrics["logprob_diff_max"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["rollout_kl"] > 1.0
    assert "logprob_diff_max" not in rollout_mismatch(batch, 4)


def test_the_distance_of_rollout_and_trainer_is_that_of_plain_sums_over_weights() -> None:
    batch = rollout()
    generator = torch.Generator().manual_seed(3)
    batch["prox_logp"] = batch["rollout_logprobs"] + 0.5 * torch.randn(batch.total_tokens, generator=generator)
    gaps = [
        gap[mask.bool()].double().tolist()
        for gap, mask in zip(
            (batch["prox_logp"] - batch["rollout_logprobs"]).split(batch.lengths.tolist()),
            batch["loss_mask"].split(batch.lengths.tolist()),
            strict=True,
        )
    ]
    logs = [gap for row in gaps for gap in row]
    weights = [math.exp(log) for log in logs]
    products = [math.exp(sum(row)) for row in gaps if row]

    def effective(values: list[float]) -> float:
        return sum(values) ** 2 / sum(value**2 for value in values) / len(values)

    metrics = rollout_mismatch(batch, 3)
    expected = {
        "rollout_kl_k1": -sum(logs) / len(logs),
        "rollout_kl": sum(w - 1 - log for w, log in zip(weights, logs, strict=True)) / len(logs),
        "rollout_chi2": sum(w * w - 1 for w in weights) / len(logs),
        "rollout_ess": effective(weights),
        "rollout_ess_sequences": effective(products),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert 0.2 < metrics["rollout_ess_sequences"] < metrics["rollout_ess"] < 0.95
