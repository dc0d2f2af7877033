"""Samples of a run, found by reward, step and text without holding their texts in memory."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.observe.board.curves import is_number
from megarl.observe.board.growing_file import GrowingFile, line_at
from megarl.observe.run_folder import RunFolder

TRAINING = "training"  # name of the source that holds trained completions
MAX_TEXT = 20_000  # characters of a turn that are sent; the rest is counted
MAX_TURNS = 200  # of a conversation
MAX_PAGE = 200  # samples of one answer
MAX_SCANNED = 64 * 2**20  # bytes of text that one search reads


@dataclass(frozen=True)
class SampleQuery:
    """Samples to find, from position `start` of the file on. Rewards and steps are within the bounds, both included."""

    start: int = 0
    count: int = 20
    least_reward: float = -math.inf
    most_reward: float = math.inf
    first_step: float = 0
    last_step: float = math.inf
    text: str = ""


class SampleFile:
    """Places, rewards and steps of the samples in one file, as it grows."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self._resets = 0
        self._clear()

    def _clear(self) -> None:
        self.offsets, self.lengths = array("q"), array("q")
        self.rewards, self.steps = array("d"), array("d")

    def refresh(self) -> None:
        """Reads the lines that came since the last call."""
        self.file.check()
        self._drop_if_void()
        for offset, length, values in self.file.new_lines():
            self._drop_if_void()
            reward, step = values.get("reward"), values.get("step")
            self.offsets.append(offset)
            self.lengths.append(length)
            self.rewards.append(reward if is_number(reward) else math.nan)
            self.steps.append(step if is_number(step) else 0)

    def _drop_if_void(self) -> None:
        if self.file.resets != self._resets:
            self._resets = self.file.resets
            self._clear()

    def find(self, query: SampleQuery) -> dict[str, Any]:
        """A page of samples that match. `next` is the position to go on from, or None after the last.

        `matching` counts the samples that match without the text, `all` all of them.
        """
        fitting = [
            n
            for n, (reward, step) in enumerate(zip(self.rewards, self.steps, strict=True))
            if query.first_step <= step <= query.last_step
            and (query.least_reward <= reward <= query.most_reward or (math.isnan(reward) and _unbounded(query)))
        ]
        samples: list[dict[str, Any]] = []
        scanned, following = 0, None
        for n in fitting:
            if n < query.start:
                continue
            if len(samples) >= min(query.count, MAX_PAGE) or scanned > MAX_SCANNED:
                following = n
                break
            scanned += self.lengths[n]
            line = line_at(self.file.path, self.offsets[n], self.lengths[n])
            if line is not None and query.text.lower() in _text_of(line).lower():
                samples.append({"position": n, **shortened(line)})
        return {"samples": samples, "next": following, "matching": len(fitting), "all": len(self.rewards)}


def _unbounded(query: SampleQuery) -> bool:
    return query.least_reward == -math.inf and query.most_reward == math.inf


def sources(run: RunFolder) -> dict[str, Path]:
    """Files of samples by name: the trained ones, then the evaluations, the last one first."""
    files = {TRAINING: run.samples} if run.samples.is_file() else {}
    return files | {path.stem: path for path in sorted(run.evaluations.glob("step-*.jsonl"), reverse=True)}


def shortened(line: dict[str, Any]) -> dict[str, Any]:
    """The sample as the page shows it: its numbers, and turns of at most MAX_TEXT characters each.

    A turn is `[sampled, text, characters left out]`.
    """
    turns = _turns_of(line)
    sample: dict[str, Any] = {
        name: line[name] for name in ("step", "problem", "reward", "solved", "tokens", "versions") if name in line
    }
    sample["turns"] = [[sampled, text[:MAX_TEXT], max(0, len(text) - MAX_TEXT)] for sampled, text in turns[:MAX_TURNS]]
    sample["turns_left_out"] = max(0, len(turns) - MAX_TURNS)
    return sample


def _turns_of(line: dict[str, Any]) -> list[tuple[bool, str]]:
    """Turns of a sample. A line without any has its `prompt` and `completion` as two."""
    turns = line.get("turns")
    if isinstance(turns, list) and turns:
        return [(bool(turn[0]), str(turn[1])) for turn in turns if isinstance(turn, list) and len(turn) >= 2]
    pair = [(False, line.get("prompt", "")), (True, line.get("completion", ""))]
    return [(sampled, str(text)) for sampled, text in pair]


def _text_of(line: dict[str, Any]) -> str:
    return "\n".join(text for _, text in _turns_of(line))
