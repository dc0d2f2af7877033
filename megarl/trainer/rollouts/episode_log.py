"""Accounts for the prompts of a run: a line for each, and the text of some trained completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.observe.logger import keep_lines
from megarl.observe.run_folder import RunFolder
from megarl.rollout.sample_lines import turns_of
from megarl.types import Episode, PackedBatch, rewards_of_samples


class EpisodeLog:
    """Writes `episodes.jsonl` and `samples.jsonl`. Its state in a checkpoint is the number of their lines."""

    def __init__(self, folder: RunFolder, tokenizer: Any, samples_per_step: int) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._samples_per_step = samples_per_step
        self._episodes = self._samples = 0  # lines

    def state_dict(self) -> dict[str, int]:
        return {"accounted": self._episodes, "samples": self._samples}

    def begin(self) -> None:
        """Begins with no line. Lines of an attempt without a checkpoint move to `.superseded.jsonl`."""
        self.load_state_dict({"accounted": 0})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues after `state`: later lines move to the files' `.superseded.jsonl`."""
        self._episodes, self._samples = state["accounted"], state.get("samples", 0)
        keep_lines(self._folder.episodes, self._episodes)
        keep_lines(self._folder.samples, self._samples)

    def add(self, episodes: Sequence[Episode], version: int, step: int) -> None:
        """Writes the prompts of `step`'s batch, sampled up to weight version `version`."""
        with self._folder.episodes.open("a", encoding="utf-8") as file:
            for episode in episodes:
                file.write(json.dumps(_account(episode, version)) + "\n")
        self._episodes += len(episodes)
        with self._folder.samples.open("a", encoding="utf-8") as file:
            for line in self._texts(episodes, step):
                file.write(json.dumps(line) + "\n")
                self._samples += 1

    def _texts(self, episodes: Sequence[Episode], step: int) -> Iterator[dict[str, Any]]:
        """Yields lines of evenly spread completions, so that many prompts have one."""
        places = [
            (episode.prompt_id, episode.group, sample)
            for episode in episodes
            if episode.group is not None
            for sample in range(episode.group.num_samples)
        ]
        count = min(self._samples_per_step, len(places))
        for number in range(count):
            prompt_id, group, sample = places[number * len(places) // count]
            segments = (group.samples == sample).nonzero().squeeze(1).tolist()
            yield {"step": step, "problem": prompt_id, **self._text(group.select(segments))}

    def _text(self, sample: PackedBatch) -> dict[str, Any]:
        """The line of one sample. Of several segments, the last one has the turns."""
        last = sample.select([sample.num_seqs - 1])
        mask = sample["loss_mask"].bool()
        versions = sample["versions"][mask].unique_consecutive().tolist() if "versions" in sample else []
        return {
            "reward": round(float(rewards_of_samples(sample)), 6),
            "versions": versions,
            "tokens": int(mask.sum()),
            "turns": turns_of(self._tokenizer, last["input_ids"], last["loss_mask"].bool()),
        }


def _account(episode: Episode, version: int) -> dict[str, Any]:
    """The line of one prompt: its rewards, or why it is not trained on."""
    line: dict[str, Any] = {"prompt_id": episode.prompt_id, "version": version}
    if episode.group is None:
        line["rejected"] = episode.reason
    else:
        line["samples"] = episode.group.num_samples
        line["rewards"] = [round(reward, 6) for reward in rewards_of_samples(episode.group).tolist()]
    if episode.dropped:
        line["dropped"] = episode.dropped
    return line
