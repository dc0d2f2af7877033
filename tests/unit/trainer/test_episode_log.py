"""Accounts of prompts, and samples with their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.observe.run_folder import RunFolder
from megarl.trainer.rollouts.episode_log import EpisodeLog
from megarl.types import Episode, PackedBatch


class Tokenizer:
    """Decodes each id to itself."""

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def episode(prompt_id: str, samples: int) -> Episode:
    """Two turns of the model, 3 and 5, between what it reads."""
    ids = torch.tensor([[1, 2, 3, 4, 5]] * samples)
    mask = torch.tensor([[0, 0, 1, 0, 1]] * samples).bool()
    padded = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(mask),
        "loss_mask": mask,
        "versions": torch.tensor([[-1, -1, 6, -1, 7]] * samples, dtype=torch.int32),
        "rewards": torch.arange(samples).float(),
    }
    return Episode(prompt_id, PackedBatch.from_padded(padded))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_log_that_begins_anew_keeps_no_line_of_an_attempt_without_a_checkpoint(folder: RunFolder) -> None:
    """Else a resume of the second attempt would keep the first lines, which are the first attempt's."""
    for name in ("first", "second"):
        log = EpisodeLog(folder, Tokenizer(), samples_per_step=1)
        log.begin()
        log.add([episode(name, 2)], version=0, step=1)
    assert [line["prompt_id"] for line in lines(folder.episodes)] == ["second"]
    assert [line["prompt_id"] for line in lines(folder.episodes.with_suffix(".superseded.jsonl"))] == ["first"]
    assert len(lines(folder.samples)) == 1


def test_samples_are_spread_over_prompts_and_keep_their_turns(folder: RunFolder) -> None:
    log = EpisodeLog(folder, Tokenizer(), samples_per_step=4)
    rejected = Episode("b", None, "timed out")
    log.add([episode("a", 4), rejected, episode("c", 4), episode("d", 8)], version=6, step=7)
    samples = lines(folder.samples)
    assert [(sample["problem"], sample["reward"]) for sample in samples] == [("a", 0), ("c", 0), ("d", 0), ("d", 4)]
    assert samples[0] == {
        "step": 7,
        "problem": "a",
        "reward": 0.0,
        "versions": [6, 7],
        "tokens": 2,
        "turns": [[False, "1 2"], [True, "3"], [False, "4"], [True, "5"]],
    }
    assert [line.get("rejected") for line in lines(folder.episodes)] == [None, "timed out", None, None]


def test_a_batch_smaller_than_asked_is_kept_whole(folder: RunFolder) -> None:
    EpisodeLog(folder, Tokenizer(), samples_per_step=100).add([episode("a", 3)], version=0, step=1)
    assert [sample["reward"] for sample in lines(folder.samples)] == [0, 1, 2]


def test_no_sample_is_kept_where_none_is_asked_for(folder: RunFolder) -> None:
    EpisodeLog(folder, Tokenizer(), samples_per_step=0).add([episode("a", 3)], version=0, step=1)
    assert lines(folder.samples) == []
    assert len(lines(folder.episodes)) == 1


def test_lines_after_the_checkpoint_move_away_on_a_resume(folder: RunFolder) -> None:
    log = EpisodeLog(folder, Tokenizer(), samples_per_step=2)
    log.add([episode("a", 2)], version=0, step=1)
    state = log.state_dict()
    log.add([episode("b", 2)], version=1, step=2)
    resumed = EpisodeLog(folder, Tokenizer(), samples_per_step=2)
    resumed.load_state_dict(state)
    assert {sample["step"] for sample in lines(folder.samples)} == {1}
    assert {sample["step"] for sample in lines(folder.path / "samples.superseded.jsonl")} == {2}
    resumed.add([episode("c", 2)], version=1, step=2)
    assert [line["prompt_id"] for line in lines(folder.episodes)] == ["a", "c"]
    assert resumed.state_dict() == {"accounted": 2, "samples": 4}
