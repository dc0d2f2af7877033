"""Checkpoints of two ranks: each reads a share of the files, and what one rank finds all of them act on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.launcher import local
from tests import warm

FILES = {f"step_000002/{name}" for name in ("manifest.json", "trainer.json")} | {
    f"step_000002/generators/rank_0000{rank}.json" for rank in (0, 1)
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of both ranks."""
    work = tmp_path_factory.mktemp("ranks")
    with warm.used():
        assert local.run_ranks("tests.unit.trainer.saver_ranks_worker", [str(work)], 2, work) == 0
    return [json.loads((work / f"seen_{rank}.json").read_text()) for rank in (0, 1)]


def test_damage_that_one_rank_reads_sends_all_to_the_checkpoint_before(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["restored"] == seen[1]["restored"] == dict.fromkeys(FILES, 1)


def test_a_write_that_fails_on_one_rank_is_raised_on_all(seen: list[dict[str, Any]]) -> None:
    message = "the checkpoint of step 3 could not be written; rank 1: FileNotFoundError"
    assert all(part["error"].startswith(message) for part in seen)
