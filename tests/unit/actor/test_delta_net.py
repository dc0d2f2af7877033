"""Gated delta nets in an engine: shared prompts, recompute, random weights, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.actor.checks import check_layout, model_checks
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model.attention import delta_net
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import same_bits
from tests.distributed.layout_worker import loss_fn, loss_weight_fn
from tests.unit.actor.test_engine import config_of, gradients
from tests.unit.actor.test_shared_prompts import shared_rollout

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3_5_text", tied=True, vocab_size=343)


def trained(folder: Path, **knobs: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, and the gradients of a step, with some knobs of the engine."""
    engine = MegatronEngine(config_of(folder, max_tokens_per_mb=100, **knobs))
    engine.initialize()
    batch = shared_rollout()
    batch["advantages"] = batch["rollout_logprobs"]
    logprobs = engine.eval().logprobs(batch)
    engine.train().train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
    return logprobs, gradients(engine)


@pytest.fixture(scope="module")
def plain(folder: Path, world_of_one: None) -> tuple[Tensor, dict[str, Tensor]]:
    return trained(folder)


@pytest.mark.parametrize("knobs", [{"shared_prefix": True}, {"recompute": "full"}, {"backend": "torch"}], ids=str)
def test_a_knob_changes_no_log_prob_and_no_gradient(
    knobs: dict[str, object], folder: Path, plain: tuple[Tensor, dict[str, Tensor]]
) -> None:
    logprobs, grads = trained(folder, **knobs)
    torch.testing.assert_close(logprobs, plain[0], atol=5e-6, rtol=0)
    for name, gradient in plain[1].items():
        assert (grads[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max() + 1e-7, name


def test_random_weights_have_norms_of_gain_one(folder: Path) -> None:
    engine = MegatronEngine(EngineConfig(path=str(folder), init="random"))
    engine.initialize()
    named = dict(engine.named_weights())
    assert not named["model.norm.weight"].any()
    assert bool((named["model.layers.0.linear_attn.norm.weight"] == 1).all())
    assert 0 < float(named["model.layers.0.linear_attn.conv1d.weight"].std()) < 0.1
    with torch.no_grad():
        assert bool(engine.eval().logprobs(shared_rollout()).isfinite().all())


@pytest.mark.parametrize(("tp", "cp"), [(8, 1), (2, 4), (1, 8)])
def test_ranks_that_do_not_divide_the_key_heads_are_refused(tp: int, cp: int, folder: Path) -> None:
    layout = ParallelConfig(tp_size=tp, cp_size=cp)
    with pytest.raises(UserError, match=r"does not divide the model's (linear_num_key_heads=4|num_attention_heads=4)"):
        check_layout(read_config(str(folder)), layout)


def test_deterministic_runs_are_refused(folder: Path) -> None:
    checks = model_checks(EngineConfig(path=str(folder)), ParallelConfig(), read_config(str(folder)), same_bits(1))
    with pytest.raises(UserError, match="deterministic=true does not cover the gated delta nets of a 'qwen3_5_text'"):
        _ = [check() for check in checks]


def test_kernels_that_do_not_load_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net.megatron_delta_net, "HAVE_FLA", False)
    with pytest.raises(UserError, match=r"actor\.backend=te runs gated delta nets on .*set actor\.backend=torch"):
        delta_net.check_kernels()
