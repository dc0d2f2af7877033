"""`actor.prepare_batch` after `connect_engine`, as AReaL's pages call it: each data rank samples its own rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.launcher.local import run_ranks
from tests.distributed.prepared_batches_worker import STEPS, Loader

LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "dp2_tp2": {"dp_size": 2, "tp_size": 2}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_data_parallel_rank_samples_its_own_rows(
    layout: str, checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    work, logs = tmp_path / "work", tmp_path / "logs"
    work.mkdir()
    logs.mkdir()
    (work / "model").symlink_to(checkpoints("qwen3", tied=False, vocab_size=343))
    knobs = LAYOUTS[layout]
    replicas, model = knobs.get("dp_size", 1), knobs.get("tp_size", 1)
    code = run_ranks(
        "tests.distributed.prepared_batches_worker", [str(work), json.dumps(knobs)], replicas * model, logs
    )
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
    ranks = [json.loads((work / f"prepared_{rank}.json").read_text()) for rank in range(replicas * model)]
    for out in ranks:
        rows = [row for row in Loader(out["data_parallel_rank"], replicas).rows if row % 3]  # dynamic_filter_fn
        for step, batch in enumerate(out["batches"]):
            prompts = [row for row in rows[2 * step : 2 * step + 2] for _ in range(2)]  # group_size completions each
            assert batch["prompts"] == prompts
            assert batch["rewards"] == [row / 2 for row in prompts]
            assert batch["lengths"] == [5] * 4
        assert len(out["batches"]) == STEPS
        first, last = out["errors"]
        assert first == "actor.prepare_batch: connect_engine(rollout) first; it samples with that engine"
        assert "the loader's file is gone" in last
    for out in ranks:  # the ranks of one data parallel rank have one batch, which its first rank samples
        heads = [other for other in ranks if other["data_parallel_rank"] == out["data_parallel_rank"]]
        assert out["batches"] == heads[0]["batches"]
        assert (out["asked"] > 0) == (out is heads[0])
