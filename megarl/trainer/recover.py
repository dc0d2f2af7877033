"""Checkpoints of a run, and its stop in order.

    checkpoints/step_000040/   engine.json, rank_*.safetensors (the engine), trainer.json (everything else)

A checkpoint is written beside and renamed, so that a folder of that name is whole.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.actor.api import TrainEngine
from megarl.knobs import UserError, knob
from megarl.parallel.broadcast import broadcast_json

REPEAT_S = 1.0  # a second signal within this time is the same request


@dataclass(frozen=True)
class SaverConfig:
    """When the run's state is written, and what is left at its end."""

    every_steps: int = knob(50, "steps between checkpoints; 0 writes one only when the run ends or is stopped")
    keep: int = knob(2, "checkpoints kept; older ones are removed")
    export_hf: bool = knob(True, "write the trained model as a HF checkpoint to hf/ at the end")

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.keep < 1:
            raise UserError(
                f"saver.every_steps={self.every_steps}, saver.keep={self.keep}: they must be at least 0 and 1"
            )


class Saver:
    """Writes and finds the checkpoints of a run folder. All ranks call every method together."""

    def __init__(self, config: SaverConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        return self.config.every_steps > 0 and step % self.config.every_steps == 0

    def save(self, engine: TrainEngine, step: int, state: dict[str, Any]) -> Path:
        """Writes the checkpoint of `step`; `state` is the trainer's own, JSON, taken from rank 0."""
        final = self.folder / f"step_{step:06d}"
        beside = final.with_name(final.name + ".partial")
        chief = not dist.is_initialized() or dist.get_rank() == 0
        if chief:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        if dist.is_initialized():
            dist.barrier()
        engine.save_state(beside)  # ends in a barrier
        if chief:
            (beside / "trainer.json").write_text(json.dumps({"step": step, **state}))
            shutil.rmtree(final, ignore_errors=True)
            beside.rename(final)
            for old in self.checkpoints()[: -self.config.keep]:
                shutil.rmtree(old)
        return final

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return whole_checkpoints(self.folder)

    def restore(self, engine: TrainEngine) -> dict[str, Any]:
        """Loads the newest checkpoint into the engine and returns the trainer's state with its `step`.

        Raises:
            UserError: there is none.
        """
        found = self.checkpoints()
        if not found:
            raise UserError(f"{self.folder} holds no checkpoint, so there is nothing to resume; start a new run")
        engine.load_state(found[-1])
        state: dict[str, Any] = broadcast_json(json.loads((found[-1] / "trainer.json").read_text()))
        return state


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder` that were written to their end, oldest first."""
    return sorted(p for p in folder.glob("step_*") if p.suffix != ".partial")


def check_resumable(run: Path, layout: dict[str, int]) -> None:
    """Refuses, before anything is started, a run whose newest checkpoint this layout cannot go on from.

    Raises:
        UserError: no whole checkpoint, another layout, or a rank's file missing.
    """
    found = whole_checkpoints(run / "checkpoints")
    if not found:
        raise UserError(f"resume={run} holds no whole checkpoint, so there is nothing to resume; start a new run")
    written = json.loads((found[-1] / "engine.json").read_text())["layout"]
    if written != layout:
        raise UserError(f"resume={run} was written with {written}, this run has {layout}; resume with the same layout")
    files, ranks = len(list(found[-1].glob("rank_*.safetensors"))), math.prod(layout.values())
    if files != ranks:
        raise UserError(f"{found[-1]} has {files} of {ranks} rank files; remove it to go on from an earlier one")


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into a request that the loop meets between steps; a second one stops at once.

    Rank 0 decides; the other ranks ignore both signals and follow it.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self._asked_at = 0.0
        self._note = note
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        chief = not dist.is_initialized() or dist.get_rank() == 0
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal if chief else signal.SIG_IGN)
        return self

    def _on_signal(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self.requested and now - self._asked_at > REPEAT_S:
            raise KeyboardInterrupt
        if self.requested:
            return  # a supervisor that signals the group and its leader
        self.requested, self._asked_at = True, now
        self._note(f"{signal.Signals(number).name}: stopping after this step with a checkpoint (again: stop at once)")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_all_ranks(self) -> bool:
        """Whether rank 0 was asked to stop, on every rank."""
        return bool(broadcast_json(self.requested))
