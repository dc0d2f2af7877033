"""Leaves out prompts that teach nothing now: those that the policy always solves, or never does.

    Batches -> Curriculum (leaves prompts out) -> rollouts -> observe (share of right completions of each prompt)

A group with equal rewards has no advantage. DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, section 3.2)
drops such a group once it is sampled; this saves sampling it. A prompt that was left out returns after some epochs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megarl.data.collate import Batches
from megarl.data.config import CurriculumConfig
from megarl.knobs import UserError
from megarl.observe.metrics import stats_tracker
from megarl.types import ORIGIN, TEACHER_SAMPLED, Episode, rewards_of_samples

logger = logging.getLogger("megarl.data")


class Curriculum:
    """The batches of prompts without those left out; a batch may have fewer prompts. Otherwise as `Batches`.

    The rows of `batches` carry their origin, with numbers below `prompts`. Per prompt it keeps `rate` float32, the
    share of right completions when last measured; `epoch` int32, when that was, -1 for never; and `streak` int32. A
    streak of +n says that the last n measurements were solved, -n that they were hopeless, 0 that it was neither.
    """

    def __init__(self, config: CurriculumConfig, batches: Batches, prompts: int, right: float):
        """A completion is right if its reward is at least `right`."""
        self.config, self.batches, self.right = config, batches, right
        self.rate = torch.full((prompts,), float("nan"))
        self.epoch = torch.full((prompts,), -1, dtype=torch.int32)
        self.streak = torch.zeros(prompts, dtype=torch.int32)
        self._read = self._skipped = 0  # prompts since the last metrics

    @property
    def batch_size(self) -> int:
        """Number of prompts in a batch, the ones left out included."""
        return self.batches.batch_size

    @property
    def rows(self) -> int:
        """Number of rows in the data set."""
        return self.batches.rows

    @property
    def examples(self) -> Any:
        """The rows themselves."""
        return self.batches.examples

    @property
    def labels(self) -> list[str]:
        """Names of the mixed sources, if there are several."""
        return self.batches.labels

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self

    def __next__(self) -> Any:
        for _ in range(2 * len(self.batches) + 2):
            rows = next(self.batches)
            epoch = self.batches.epoch
            kept = [row for row in rows if not self.is_left_out(row[ORIGIN]["row"], epoch)]
            self._read += len(rows)
            self._skipped += len(rows) - len(kept)
            if kept:
                return [{**row, ORIGIN: {**row[ORIGIN], "epoch": epoch}} for row in kept]
        logger.warning("all %d prompts were solved or hopeless when last measured: all return", len(self.rate))
        self.streak.zero_()
        return next(self)

    def is_left_out(self, prompt: int, epoch: int) -> bool:
        """True if the prompt is skipped in this epoch."""
        streak = int(self.streak[prompt])
        skip = self.config.skip
        counts = (streak > 0 and skip in ("solved", "both")) or (streak < 0 and skip in ("hopeless", "both"))
        due = int(self.epoch[prompt]) + self.config.revisit_epochs < epoch
        return counts and abs(streak) >= self.config.patience and not due

    def observe(self, episodes: Sequence[Episode]) -> None:
        """Measures the prompts of a batch by the policy's rewards, refused groups included, and records metrics."""
        self.batches.observe(episodes)
        for episode in episodes:
            group = episode.group
            rewards = rewards_of_samples(group).tolist() if group is not None else episode.rewards
            if group is not None and TEACHER_SAMPLED in group:
                rewards = [r for r, own in zip(rewards, ~group.of_samples(TEACHER_SAMPLED), strict=True) if own]
            if rewards and "epoch" in episode.origin:
                share = sum(reward >= self.right for reward in rewards) / len(rewards)
                self._measure(episode.origin["row"], episode.origin["epoch"], share)
        measured = self.epoch >= 0
        with stats_tracker.scope("data"):
            if self._read:
                stats_tracker.scalar(skipped_share=self._skipped / self._read)
            if bool(measured.any()):
                stats_tracker.scalar(
                    solved_share=float((self.streak[measured] > 0).double().mean()),
                    hopeless_share=float((self.streak[measured] < 0).double().mean()),
                    measured_share=float(measured.double().mean()),
                )
        self._read = self._skipped = 0

    def _measure(self, prompt: int, epoch: int, share: float) -> None:
        streak = int(self.streak[prompt])
        if share >= self.config.solved_rate:
            streak = max(streak, 0) + 1
        elif share <= self.config.hopeless_rate:
            streak = min(streak, 0) - 1
        else:
            streak = 0
        self.rate[prompt], self.epoch[prompt], self.streak[prompt] = share, epoch, streak

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data, and the measurements."""
        measured = {"rate": self.rate.clone(), "epoch": self.epoch.clone(), "streak": self.streak.clone()}
        return {**self.batches.state_dict(), "curriculum": {**measured, "read": self._read, "skipped": self._skipped}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`. One of a run without a curriculum has no measurements.

        Raises:
            UserError: the data set or its settings differ.
        """
        self.batches.load_state_dict(state)
        saved = state.get("curriculum")
        if saved is None:
            logger.warning("the checkpoint holds no measured pass rates: the curriculum begins without any")
            return
        if len(saved["rate"]) != len(self.rate):
            raise UserError(
                f"cannot resume the curriculum: the checkpoint has measurements of {len(saved['rate'])} prompts, the "
                f"data now has {len(self.rate)}; resume with the same data"
            )
        self.rate, self.epoch, self.streak = (saved[name].clone() for name in ("rate", "epoch", "streak"))
        self._read, self._skipped = saved["read"], saved["skipped"]
