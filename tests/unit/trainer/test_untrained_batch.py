"""A batch whose teacher is lost is not trained on, so a checkpoint has the state before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.observe.run_folder import RunFolder
from megarl.trainer.rollouts.rollout_driver import RolloutDriver
from megarl.types import PackedBatch, cu_seqlens_of

BATCH = PackedBatch(cu_seqlens_of(torch.tensor([2])), {"input_ids": torch.tensor([1, 2])})


class Engine:
    """Counts the batches that it has handed out, and keeps the rows in one list, as a loader may."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.episodes: list[Any] = []

    def prepare_batch(self, *_: Any, **__: Any) -> PackedBatch:
        self.rows.append(len(self.rows))
        return BATCH

    def get_version(self) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}


@pytest.mark.parametrize(("teacher", "kept"), [("server", 0), ("none", 1)])
def test_the_state_is_that_before_a_batch_which_a_teacher_has_to_score(teacher: str, kept: int, tmp_path: Any) -> None:
    config = cli.load(["+experiment=gsm8k_grpo"])
    stub: Any = SimpleNamespace(teacher=SimpleNamespace(source=teacher), logger=config.logger, colocate=False)
    inputs: Any = SimpleNamespace(train=SimpleNamespace(observe=lambda _: None), tokenizer=None)
    driver = RolloutDriver.__new__(RolloutDriver)
    whole = RolloutDriver(config, RunFolder(tmp_path), inputs, SimpleNamespace(should_accept=None), None)  # type: ignore[arg-type]
    driver.__dict__ = {**whole.__dict__, "config": stub}
    engine = Engine()
    driver._rank0 = SimpleNamespace(engine=engine, workflow=None)  # type: ignore[assignment]
    driver._on_rank0 = lambda ask: ask()  # type: ignore[method-assign]
    driver.weights = SimpleNamespace(gpus=SimpleNamespace(for_training=lambda: None))  # type: ignore[assignment]
    driver.next_batch()
    assert len(driver.state_dict()["rows"]) == kept
    driver.taken()
    assert len(driver.state_dict()["rows"]) == 1
    driver.next_batch()
    driver.taken()
    assert len(driver.state_dict()["rows"]) == 2
