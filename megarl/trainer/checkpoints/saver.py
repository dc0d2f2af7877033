"""Checkpoints of a run, and its stop in order.

checkpoints/step_000040/
    manifest.json                          every file with its size and SHA-256 (manifest.py)
    actor/                                 an engine's state, which any layout reads (actor/checkpoint/stored_state.py)
    trainer.json, trainer.safetensors      facts of the run, and where its data and rollouts stand (state.py)
    generators/rank_00000.json             a rank's random generators
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from megarl.actor.api import TrainEngine
from megarl.actor.checkpoint.stored_state import check_facts
from megarl.knobs import UserError, knob
from megarl.parallel import platform
from megarl.parallel.broadcast import broadcast_json, gather_json
from megarl.trainer.checkpoints import manifest, rng_state, trainer_state
from megarl.trainer.checkpoints.manifest import REMOVING, WRITING, Damaged

REPEAT_S = 1.0  # a second signal within this time is the same request
ACTOR = "actor"  # the engine that every run has


@dataclass(frozen=True)
class SaverConfig:
    """When the run's state is written, and what is left at its end."""

    every_steps: int = knob(50, "steps between checkpoints; 0 writes one only when the run ends or is stopped")
    keep: int = knob(2, "checkpoints kept; older ones are removed")
    asynchronous: bool = knob(True, "train on while a checkpoint is written, from a copy of the state on the host")
    timeout_s: float = knob(3600.0, "seconds that the writing of a checkpoint may take")
    export_hf: bool = knob(True, "write the trained model as a HF checkpoint to hf/ at the end")

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.keep < 1:
            raise UserError(
                f"saver.every_steps={self.every_steps}, saver.keep={self.keep}: they must be at least 0 and 1"
            )
        if self.timeout_s <= 0:
            raise UserError(f"saver.timeout_s={self.timeout_s} must be above 0")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the message says on which rank and why."""


class _Write:
    """The writing of this rank's part of a checkpoint, in a thread."""

    def __init__(self, step: int, beside: Path, work: Callable[[], dict[str, tuple[int, str]]]) -> None:
        self.step, self.beside = step, beside
        self.files: dict[str, tuple[int, str]] = {}
        self.seconds = 0.0  # that it took
        self._started = time.monotonic()
        self.error: str | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.files = self._work()
            self.seconds = time.monotonic() - self._started
        except Exception as error:  # whatever it is, the rank that waits raises it
            self.error = f"{type(error).__name__}: {error}"

    @property
    def code(self) -> int:
        """0 failed, 1 under way, 2 written."""
        return 0 if self.error else 1 if self._thread.is_alive() else 2

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.error = f"not written within saver.timeout_s={timeout_s:g} seconds"


class Saver:
    """Writes and finds the checkpoints of a run folder. All ranks call every method together."""

    def __init__(self, config: SaverConfig, folder: Path, note: Callable[[str], None]) -> None:
        """`note` shows a line on rank 0."""
        self.config = config
        self.folder = folder
        self.saved: int | None = None  # step of the newest checkpoint, restored or begun
        self._note = note
        self._pending: _Write | None = None
        self._chief = not dist.is_initialized() or dist.get_rank() == 0

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`."""
        return self.config.every_steps > 0 and step % self.config.every_steps == 0

    # -- writing -------------------------------------------------------------------------------------------------

    def save(self, engines: Mapping[str, TrainEngine], step: int, trainer: dict[str, Any]) -> None:
        """Copies the state of `step` and writes it, or, asynchronous, begins to; `trainer` is taken from rank 0.

        Raises:
            CheckpointError: this checkpoint, or the one before that was still being written, cannot be written.
        """
        self.finish()
        beside = self.folder / f"step_{step:06d}{WRITING}"
        self._on_chief(step, lambda: self._clear(beside))
        snapshots = {name: engine.snapshot_state() for name, engine in engines.items()}
        rank = dist.get_rank() if dist.is_initialized() else 0
        text, tensors = trainer_state.freeze({"step": step, **trainer}) if self._chief else ("", {})
        random = json.dumps(rng_state.state())

        def work() -> dict[str, tuple[int, str]]:
            written = [path for name, taken in snapshots.items() for path in taken.write(beside / name)]
            (beside / "generators").mkdir(exist_ok=True)
            written.append(_generators(beside, rank))
            written[-1].write_text(random)
            if self._chief:
                written += trainer_state.write(beside, text, tensors)
            return manifest.describe(beside, written)

        self._pending = _Write(step, beside, work)
        self.saved = step
        if not self.config.asynchronous:
            self.finish()

    def _clear(self, beside: Path) -> None:
        """Removes what runs that were killed have left, and makes the folder to write to."""
        for suffix in (WRITING, REMOVING):
            for left in self.folder.glob(f"step_*{suffix}"):
                shutil.rmtree(left)
        beside.mkdir(parents=True)

    def poll(self) -> None:
        """At a step's end: seals a checkpoint that all ranks have written by now.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._pending is None:
            return
        code = torch.tensor(self._pending.code, device=platform.device())
        if dist.is_initialized():
            dist.all_reduce(code, dist.ReduceOp.MIN)
        if int(code) != 1:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if any, and gives it its name.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._pending is None:
            return
        write, self._pending = self._pending, None
        write.wait(self.config.timeout_s)
        everyone = gather_json({"files": write.files, "error": write.error})
        errors = [f"rank {rank}: {theirs['error']}" for rank, theirs in enumerate(everyone) if theirs["error"]]
        if errors:
            if self._chief:
                shutil.rmtree(write.beside, ignore_errors=True)  # a full disk is not helped by it staying
            raise CheckpointError(f"the checkpoint of step {write.step} could not be written; {'; '.join(errors)}")
        files = {name: tuple(facts) for theirs in everyone for name, facts in theirs["files"].items()}
        final = write.beside.with_suffix("")
        self._on_chief(write.step, lambda: self._seal(write, final, files))
        size = sum(size for size, _ in files.values()) / 1e6
        self._note(f"checkpoint of step {write.step} in {final} ({size:.1f} MB, {write.seconds:.2f} s)")

    def _seal(self, write: _Write, final: Path, files: dict[str, Any]) -> None:
        manifest.seal(write.beside, write.step, files)
        if final.exists():  # a damaged one, which a resume went back behind
            self._remove(final)
        manifest.rename(write.beside, final)
        for old in manifest.step_folders(self.folder)[self.config.keep :]:
            self._remove(old)

    def _remove(self, folder: Path) -> None:
        gone = folder.with_name(folder.name + REMOVING)
        manifest.rename(folder, gone)  # at no time is half a checkpoint there under its name
        shutil.rmtree(gone)

    def _on_chief(self, step: int, work: Callable[[], None]) -> None:
        """Does `work` on rank 0; where it fails, all ranks raise."""
        error = None
        if self._chief:
            try:
                work()
            except OSError as failure:
                error = str(failure)
        if error := broadcast_json(error):
            raise CheckpointError(f"the checkpoint of step {step} could not be written; rank 0: {error}")

    # -- reading -------------------------------------------------------------------------------------------------

    def restore(self, engines: Mapping[str, TrainEngine]) -> dict[str, Any]:
        """Loads the newest checkpoint that is whole into the engines and returns the trainer's state with its `step`.

        Raises:
            UserError: there is none, or it is of other engines.
        """
        found = self._newest_whole()
        for name, engine in engines.items():
            engine.load_state(found / name)
        self._restore_generators(found)
        restored = trainer_state.read(found)
        self.saved = restored["step"]
        return restored

    def _newest_whole(self) -> Path:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        names = broadcast_json([p.name for p in manifest.step_folders(self.folder)] if self._chief else None)
        for name in names:
            problem = None
            try:
                read = manifest.read(self.folder / name)
                read.check_sizes()
                read.check_content(rank, world)  # every rank a share of the files
            except Damaged as error:
                problem = str(error)
            problem = next((theirs for theirs in gather_json(problem) if theirs), None)
            if problem is None:
                return self.folder / name
            self._note(f"checkpoint {self.folder / name} is damaged ({problem}); looking at the one before")
        raise UserError(f"{self.folder} holds no whole checkpoint, so there is nothing to resume; start a new run")

    def _restore_generators(self, found: Path) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        new = not _generators(found, rank).is_file()
        if new:
            rng_state.derive(json.loads(_generators(found, 0).read_text()), rank)
        else:
            rng_state.restore(json.loads(_generators(found, rank).read_text()))
        ranks = [str(rank) for rank, is_new in enumerate(gather_json(new)) if is_new]
        if ranks:
            self._note(f"ranks {', '.join(ranks)} are new: their random generators are seeded from rank 0's")


def _generators(checkpoint: Path, rank: int) -> Path:
    return checkpoint / "generators" / f"rank_{rank:05d}.json"


def check_resumable(run: Path, model: PretrainedConfig, dtype: str) -> None:
    """Refuses, before anything is started, a run whose newest checkpoint the model cannot go on from.

    Files are looked at by their sizes here; `Saver.restore` reads what is in them, shared out over the ranks.

    Raises:
        UserError: no whole checkpoint, a newer format, another model or another dtype.
    """
    why = "there is none"
    for folder in manifest.step_folders(run / "checkpoints"):
        try:
            manifest.read(folder).check_sizes()
        except Damaged as error:
            why = f"{folder.name}: {error}" if why == "there is none" else why
            continue
        check_facts(folder / ACTOR, model, dtype)
        return
    raise UserError(f"resume={run} holds no whole checkpoint ({why}), so there is nothing to resume; start a new run")


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
