"""Ranks may pass batches of their own: every result equals that of one shared batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.launcher.local import run_ranks
from megarl.types import PackedBatch
from tests.distributed.rank_batches_worker import SPREADS
from tests.distributed.test_layouts import make_batch

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {"dp_size": 2}, "dp2_tp2": {"dp_size": 2, "tp_size": 2}}


@pytest.fixture(scope="module", params=LAYOUTS)
def world(
    request: pytest.FixtureRequest, checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    """The folder of results, and the number of ranks."""
    work, logs = tmp_path_factory.mktemp("own"), tmp_path_factory.mktemp("logs")
    (work / "model").symlink_to(checkpoints("qwen3", tied=False, vocab_size=343))
    save_file(make_batch(343), work / "batch.safetensors")
    knobs = LAYOUTS[request.param]
    ranks = knobs["dp_size"] * knobs.get("tp_size", 1)
    code = run_ranks("tests.distributed.rank_batches_worker", [str(work), json.dumps(knobs)], ranks, logs)
    assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
    return work, ranks


def results(work: Path, spread: str, rank: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    return load_file(work / f"{spread}_{rank}.safetensors"), json.loads((work / f"{spread}_{rank}.json").read_text())


@pytest.mark.parametrize("spread", ["own", "alike"])
def test_own_batches_give_the_shared_batchs_numbers(world: tuple[Path, int], spread: str) -> None:
    work, ranks = world
    stored = load_file(work / "batch.safetensors")
    batch = PackedBatch(stored.pop("cu_seqlens"), stored)
    shared, shared_stats = results(work, "shared", 0)
    assert shared["logprobs"].abs().max() > 1
    for rank in range(ranks):
        out, stats = results(work, spread, rank)
        place = batch.token_index(SPREADS[spread][rank * 2 // ranks])
        assert torch.equal(out["logprobs"], shared["logprobs"][place])
        assert torch.equal(out["best"], shared["best"][place])
        assert torch.equal(out["prox_logp"], shared["prox_logp"][place])
        assert stats == shared_stats
    after, _ = results(work, spread, 0)
    assert all(torch.equal(after[name], shared[name]) for name in shared if name.startswith("after."))


def test_ranks_that_must_agree_and_do_not_are_refused(world: tuple[Path, int]) -> None:
    work, ranks = world
    messages = [(work / f"refused_{rank}.txt").read_text() for rank in range(ranks)]
    if ranks == 2:  # two data parallel ranks with a sequence each
        assert messages == ["", ""]
    else:
        assert set(messages) == {
            "ranks 0 and 1 passed different sequences, and both are of data parallel rank 0: pass one batch on "
            "all ranks, or one for each engine.data_parallel_rank"
        }
