"""GRPO with adapters alone on the wire, on a base of 4 bits: steps by the trainer's own pieces on a server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl import cli
from megarl.actor.rollout_mismatch import rollout_mismatch
from megarl.actor.weights.computed_boxes import ComputedBox, values_of
from megarl.actor.weights.peft_files import write
from megarl.actor.weights.shards import tensor_shapes
from megarl.algorithms import algorithm_of
from megarl.families import read_config, with_adapters
from megarl.families.adapters import is_adapter
from megarl.observe.run_folder import new_run
from megarl.preflight.planned_sync import planned_sync
from megarl.reshard.session import SyncReport
from megarl.served_checks import adapters_on_servers
from megarl.trainer import rl
from megarl.trainer.inputs import read_inputs

STEPS = 3
OVERRIDES = (
    "+experiment=gsm8k_grpo", "train_dataset.batch_size=8", "algorithm.n_minibatches=1", "server.n_servers=1",
    "server.max_restarts=0", "actor.optimizer.lr=1e-2", "actor.lora.rank=4", "actor.lora.rslora=true",
    "actor.lora.sync=adapters", "actor.lora.quantization=nf4", "rollout.max_head_offpolicyness=0",
)  # fmt: skip


def draw(folder: Path) -> dict[str, Tensor]:
    """Writes a random adapter of the run's shape in PEFT's format, and returns its matrices."""
    config = cli.load([*OVERRIDES])
    adapters, model = adapters_on_servers(config), read_config(config.actor.path)
    assert adapters is not None
    generator = torch.Generator().manual_seed(3)
    shapes = tensor_shapes(with_adapters(model, adapters.shape))
    drawn = {name: 0.03 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    write(folder, drawn, adapters.shape, dropout=0.0, base=config.actor.path)
    return drawn


def test_a_run_that_sends_adapters_alone_samples_what_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw(tmp_path / "adapter")
    config = cli.load([*OVERRIDES, f"run_root={tmp_path}", f"actor.lora.path={tmp_path / 'adapter'}"])
    algorithm, inputs, adapters = algorithm_of(config.algorithm), read_inputs(config, 0), adapters_on_servers(config)
    folder = new_run(config.run_root, "adapters")
    with rl.rollouts_of(config, folder, inputs, algorithm) as sampled:
        models = rl.Models.build(config, algorithm)
        base = [values_of(s.view).clone() for s in models.actor.shards() if not is_adapter(s.name)]
        weights = sampled.weights
        weights.connect(models.actor, 0, models.saved.values(), config.actor.lora.starts_as_checkpoint)
        sampled.connect(models.actor, 0)
        assert weights.outdated, "a server starts with zeros, and the run with the adapter of actor.lora.path"
        reports: list[SyncReport] = []
        push = weights.session.push
        monkeypatch.setattr(weights.session, "push", lambda *given: reports.append(push(*given)) or reports[-1])
        sampled.push(version=0)
        for step in range(1, STEPS + 1):
            batch = sampled.next_batch()
            models.score(batch)
            models.actor.compute_advantages(batch)
            models.update(batch)
            sampled.check_logprobs(batch)
            difference = rollout_mismatch(batch, sampled.version)["logprob_diff_max"]
            assert difference <= 1e-4
            sampled.push(version=step)
        shards = models.actor.shards()
        own = sum(s.view.nbytes for s in shards if is_adapter(s.name))
        assert [report.bytes for report in reports] == [own + sum(view.nbytes for view in base), own, own, own]
        assert reports[-1].verified >= len([s for s in shards if is_adapter(s.name)])
        plan = planned_sync(config, inputs.model, adapters)
        assert int(plan.bytes_in.sum()) == own, "preflight tells the same"
        frozen = [values_of(s.view) for s in shards if not is_adapter(s.name)]
        assert all(torch.equal(now, before) for now, before in zip(frozen, base, strict=True))
        assert any(isinstance(s.view, ComputedBox) for s in shards), "the server's base is what the codes say"
        assert not any(
            torch.equal(s.view, drawn[s.name])
            for s in shards
            if s.name in drawn and s.view.shape == drawn[s.name].shape
        )
        models.destroy()
