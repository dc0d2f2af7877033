"""User code on the engine: the guide's program, and REINFORCE in the two classes of AReaL's algorithm page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import megarl
from megarl.actor.api import FinetuneSpec, TrainEngine
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.ops.logprob import gather_logprobs
from megarl.parallel import groups
from megarl.types import PackedBatch, WeightUpdateMeta

ROOT = Path(__file__).parents[3]


def test_the_guides_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    guide = ROOT / "docs/custom_training.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", guide.read_text(), re.M | re.S)
    assert len(blocks) >= 7
    names: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(compile(block, str(guide), "exec"), names)
        assert {p.name for p in (names["folder"] / "v1").iterdir()} >= {"model.safetensors", "config.json"}
    finally:
        groups.destroy()


def test_the_guides_losses_on_logits_and_on_log_probs_are_one(
    checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs/custom_training.md").read_text()
    names: dict[str, Any] = {"torch": torch, "gather_logprobs": gather_logprobs, "megarl": megarl}
    for name in ("reinforce", "policy_gradient"):
        source = re.search(rf"^def {name}\(.*?(?=^\n|^```)", text, re.M | re.S)
        assert source is not None
        exec(source[0], names)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 343, (3, 9), generator=generator)
    mask = torch.arange(9) >= torch.tensor([[0], [3], [8]])  # a first token is predicted by nothing
    batch = {"input_ids": ids, "loss_mask": mask, "rewards": torch.randn(3, 9, generator=generator)}
    engine = MegatronEngine(EngineConfig(path=str(checkpoints("qwen3", tied=True))))
    engine.initialize()
    try:
        weight = {"loss_weight_fn": lambda data: 1.0}
        on_logits = engine.eval_batch(batch, names["reinforce"], **weight)["loss"]
        trained = {**batch, "loss_mask": mask & (torch.arange(9) > 0)}
        on_logprobs = engine.eval_batch(trained, names["policy_gradient"], **weight, loss_input="logprobs")["loss"]
    finally:
        groups.destroy()
    assert on_logits == pytest.approx(on_logprobs, rel=1e-5)


def reinforce_loss_fn(logits: Tensor, data: PackedBatch) -> Tensor:
    ids, mask, rewards = data["input_ids"], data["loss_mask"].bool(), data["rewards"]
    logprobs = gather_logprobs(logits, torch.roll(ids, shifts=-1, dims=-1))
    return torch.where(mask, -logprobs * rewards, 0.0).sum() / mask.count_nonzero()


class ReinforceActor:
    """The algorithm. It uses only the engine's interface."""

    def __init__(self, engine: TrainEngine):
        self.engine = engine

    def train_reinforce(self, data: Any) -> dict[str, float]:
        self.engine.train()
        return self.engine.train_batch(
            data, loss_fn=reinforce_loss_fn, loss_weight_fn=lambda x: x["loss_mask"].count_nonzero()
        )


class MegatronReinforceActor(MegatronEngine):
    """The engine, with the algorithm as a member."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.actor = ReinforceActor(self)

    def train_reinforce(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return self.actor.train_reinforce(*args, **kwargs)


def episode(generator: torch.Generator, prompt: int, completion: int) -> dict[str, Tensor]:
    """Builds the result of the page's workflow for one prompt. Its `rewards` has no batch dimension."""
    length = prompt + completion
    return {
        "input_ids": torch.randint(0, 343, (length,), generator=generator).unsqueeze(0),
        "loss_mask": torch.tensor([0] * prompt + [1] * completion).unsqueeze(0),
        "versions": torch.tensor([-1] * prompt + [0] * completion).unsqueeze(0),
        "attention_mask": torch.ones(length, dtype=torch.bool).unsqueeze(0),
        "rewards": torch.tensor([float(torch.randn((), generator=generator))] * length),
    }


def test_reinforce_in_two_classes_trains_as_plain_torch_does(checkpoints: Callable[..., Path]) -> None:
    folder = checkpoints("qwen3", tied=True, vocab_size=343)
    config = EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.0))
    actor = MegatronReinforceActor(config=config)
    actor.initialize(None, FinetuneSpec(1, 8, 4))
    generator = torch.Generator().manual_seed(0)
    episodes = [episode(generator, prompt, completion) for prompt, completion in ((3, 8), (5, 4), (2, 9), (4, 16))]
    batch = PackedBatch.concat(PackedBatch.from_padded(e) for e in episodes)
    batch = batch.to(actor.device)
    dist.barrier()
    torch.cuda.synchronize()
    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats = actor.train_reinforce(batch)
        actor.step_lr_scheduler()
    assert "time_s/train_step" in stats_tracker.export()

    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = reinforce_loss_fn(torch.cat([model(e["input_ids"]).logits[0] for e in episodes]), batch)
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    assert stats["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    actor.destroy()


class Session:
    """Records uploads instead of sending them to servers."""

    def __init__(self) -> None:
        self.uploads: list[tuple[Any, WeightUpdateMeta]] = []

    def expect(self, meta: WeightUpdateMeta) -> Any: ...

    def upload(self, weights: Any, meta: WeightUpdateMeta) -> None:
        self.uploads.append((weights, meta))


def test_weights_go_to_the_session_or_to_files_and_come_back(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoints("qwen3", tied=True, vocab_size=343)
    other = checkpoints("qwen3", tied=True, vocab_size=343, seed=5)
    engine = MegatronEngine(EngineConfig(path=str(folder), optimizer=OptimizerConfig(lr=1e-3)))
    engine.initialize()
    engine.upload_weights(WeightUpdateMeta(type="disk", path=str(tmp_path / "v1"), model_version=1))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "v1").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    with pytest.raises(UserError, match=r"type=gloo needs a session.*connect\(session\)"):
        engine.upload_weights(WeightUpdateMeta(type="gloo", model_version=2))
    session = Session()
    engine.connect(session)
    meta = WeightUpdateMeta(type="gloo", model_version=2)
    engine.upload_weights(meta)
    assert session.uploads == [(engine, meta)]

    def step() -> dict[str, float]:
        ids = torch.arange(12)[None]
        return engine.train_batch({"input_ids": ids}, lambda logits, _: logits.square().mean(), lambda _: 1.0)

    engine.load(other)
    fresh = MegatronEngine(EngineConfig(path=str(other), optimizer=OptimizerConfig(lr=1e-3)))
    fresh.initialize()
    assert (
        step()["loss"]
        == fresh.eval_batch(
            {"input_ids": torch.arange(12)[None]}, lambda logits, _: logits.square().mean(), lambda _: 1.0
        )["loss"]
    )
    engine.save(tmp_path / "native", weight_format="native")
    after = step()
    engine.load(tmp_path / "native", weight_format="native")
    assert step() == after
    engine.destroy()
