"""Writes, finds and restores the checkpoints of a run.

checkpoints/step_000040/
    manifest.json                          every file with its size and SHA-256 (manifest.py)
    actor/                                 an engine's state, which any layout reads (actor/checkpoint/stored_state.py)
    trainer.json, trainer.safetensors      facts of the run, positions in data and rollouts (trainer_state.py)
    generators/rank_00000.json             a rank's random generators (rng_state.py)
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from megarl.actor.api import TrainEngine
from megarl.actor.checkpoint.stored_state import FACTS, check_facts
from megarl.actor.config import EngineConfig
from megarl.actor.weights.adapter_shards import shape_of
from megarl.config import SaverConfig
from megarl.families import with_adapters
from megarl.knobs import UserError
from megarl.observe.run_folder import RunTakenError
from megarl.parallel import platform
from megarl.parallel.broadcast import broadcast_json, gather_json, is_rank0
from megarl.trainer.checkpoints import manifest, rng_state, trainer_state
from megarl.trainer.checkpoints.manifest import REMOVING, WRITING, Damaged

ACTOR = "actor"  # the engine that every run has


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The message names the rank and the cause."""


class _Write:
    """Writes this rank's part of a checkpoint in a thread."""

    def __init__(self, step: int, folder: Path, work: Callable[[], dict[str, tuple[int, str]]]) -> None:
        self.step, self.folder = step, folder
        self.files: dict[str, tuple[int, str]] = {}
        self.seconds = 0.0
        self._started = time.monotonic()
        self.error: str | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.files = self._work()
            self.seconds = time.monotonic() - self._started
        except Exception as error:  # raised by the rank that waits
            self.error = f"{type(error).__name__}: {error}"

    @property
    def code(self) -> int:
        """0: failed, 1: in progress, 2: written."""
        return 0 if self.error else 1 if self._thread.is_alive() else 2

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.error = f"not written within saver.timeout_s={timeout_s:g} seconds"


class Saver:
    """Writes and restores the checkpoints of a run folder. All ranks call every method together."""

    def __init__(
        self,
        config: SaverConfig,
        folder: Path,
        note: Callable[[str], None],
        check_owner: Callable[[], None] = lambda: None,
        lines: Sequence[Path] = (),
    ) -> None:
        """`note` prints a line on rank 0. There `check_owner` raises if another command has the folder by now.

        `lines` are files outside whose lines a resume counts on. They are on disk before a checkpoint has its name.
        """
        self.config = config
        self.folder = folder
        self.saved: int | None = None  # step of the newest checkpoint, restored or in progress
        self._note = note
        self._check_owner = check_owner
        self._lines = lines
        self._pending: _Write | None = None
        self._damaged: set[str] = set()  # names of checkpoints that a resume passed over
        self._is_rank0 = is_rank0()

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after `step`."""
        return self.config.every_steps > 0 and step % self.config.every_steps == 0

    # -- writing -------------------------------------------------------------------------------------------------

    def save(self, engines: Mapping[str, TrainEngine], step: int, trainer: dict[str, Any]) -> None:
        """Copies the state of `step` to the host and writes it, in the background if `asynchronous`.

        The state `trainer` is rank 0's.

        Raises:
            CheckpointError: this checkpoint, or the one in progress before it, cannot be written.
        """
        self.finish()
        folder = self.folder / f"step_{step:06d}{WRITING}"
        self._on_rank0(step, lambda: self._clear(folder))
        snapshots = {name: engine.snapshot_state() for name, engine in engines.items()}
        rank = dist.get_rank() if dist.is_initialized() else 0
        text, tensors = trainer_state.freeze({"step": step, **trainer}) if self._is_rank0 else ("", {})
        random = json.dumps(rng_state.state())

        def work() -> dict[str, tuple[int, str]]:
            written = [path for name, snapshot in snapshots.items() for path in snapshot.write(folder / name)]
            (folder / "generators").mkdir(exist_ok=True)
            written.append(_generators(folder, rank))
            written[-1].write_text(random)
            if self._is_rank0:
                written += trainer_state.write(folder, text, tensors)
            return manifest.describe(folder, written)

        self._pending = _Write(step, folder, work)
        self.saved = step
        if not self.config.asynchronous:
            self.finish()

    def _clear(self, folder: Path) -> None:
        """Removes the leftovers of killed runs, and makes the folder to write to."""
        for suffix in (WRITING, REMOVING):
            for leftover in self.folder.glob(f"step_*{suffix}"):
                if leftover == folder:
                    shutil.rmtree(leftover)
                else:
                    self._discard(leftover)
        folder.mkdir(parents=True)

    def poll(self) -> None:
        """Seals the checkpoint in progress if all ranks have written it. Called at each step's end.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._pending is None:
            return
        code = torch.tensor(self._pending.code).to(platform.device(), non_blocking=True)
        if dist.is_initialized():
            dist.all_reduce(code, dist.ReduceOp.MIN)
        if int(code) != 1:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint in progress, if any, and gives it its final name.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._pending is None:
            return
        write, self._pending = self._pending, None
        write.wait(self.config.timeout_s)
        everyone = gather_json({"files": write.files, "error": write.error})
        errors = [f"rank {rank}: {part['error']}" for rank, part in enumerate(everyone) if part["error"]]
        if errors:
            if self._is_rank0:
                shutil.rmtree(write.folder, ignore_errors=True)  # frees the space of a full disk
            raise CheckpointError(f"the checkpoint of step {write.step} could not be written; {'; '.join(errors)}")
        files = {name: tuple(facts) for part in everyone for name, facts in part["files"].items()}
        final = write.folder.with_suffix("")
        self._on_rank0(write.step, lambda: self._seal(write, final, files))
        size = sum(size for size, _ in files.values()) / 1e6
        self._note(f"checkpoint of step {write.step} in {final} ({size:.1f} MB, {write.seconds:.2f} s)")

    def _seal(self, write: _Write, final: Path, files: dict[str, Any]) -> None:
        manifest.seal(write.folder, write.step, files)
        for path in (*self._lines, self.folder.parent):
            if path.exists():
                manifest.flush(path)
        if final.exists():  # damaged: a resume went back to an earlier one
            self._remove(final)
        manifest.rename(write.folder, final)
        self._damaged.discard(final.name)
        folders = manifest.step_folders(self.folder)
        folders = folders[folders.index(final) :]  # newer ones are damaged
        whole = [folder for folder in folders if folder.name not in self._damaged]
        for old in folders[folders.index(whole[: self.config.keep][-1]) + 1 :]:
            self._remove(old)

    def _remove(self, folder: Path) -> None:
        gone = folder.with_suffix(REMOVING)
        while gone.exists():  # left by an earlier try
            gone = gone.with_suffix(f".again{REMOVING}")
        manifest.rename(folder, gone)  # a checkpoint's name never holds half of one
        self._discard(gone)

    def _discard(self, folder: Path) -> None:
        """Removes a folder that no resume looks at. What cannot be removed now is left for the next checkpoint.

        A network file system keeps a file that another process still reads, and with it the folder.
        """
        try:
            shutil.rmtree(folder)
        except OSError as error:
            self._note(f"{folder} could not be removed ({error}); the next checkpoint tries again")

    def _on_rank0(self, step: int, work: Callable[[], None]) -> None:
        """Runs `work` on rank 0. If it fails, all ranks raise."""
        error = None
        if self._is_rank0:
            try:
                self._check_owner()
                work()
            except (OSError, RunTakenError) as failure:
                error = str(failure)
        if error := broadcast_json(error):
            raise CheckpointError(f"the checkpoint of step {step} could not be written; rank 0: {error}")

    # -- reading -------------------------------------------------------------------------------------------------

    def restore(self, engines: Mapping[str, TrainEngine]) -> dict[str, Any]:
        """Loads the newest whole checkpoint into the engines. Returns the trainer's state with its `step`.

        Raises:
            UserError: no checkpoint is whole, or its engines are others.
        """
        checkpoint = self._newest_whole()
        for name, engine in engines.items():
            engine.load_state(checkpoint / name)
        self._restore_generators(checkpoint)
        restored = trainer_state.read(checkpoint)
        self.saved = restored["step"]
        return restored

    def _newest_whole(self) -> Path:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        names = broadcast_json([p.name for p in manifest.step_folders(self.folder)] if self._is_rank0 else None)
        for name in names:
            problem = None
            try:
                read = manifest.read(self.folder / name)
                read.check_sizes()
                read.check_content(rank, world)  # each rank reads a share of the files
            except Damaged as error:
                problem = str(error)
            problem = next((text for text in gather_json(problem) if text), None)
            if problem is None:
                return self.folder / name
            self._damaged.add(name)
            self._note(f"checkpoint {self.folder / name} is damaged ({problem}); looking at the one before")
        raise UserError(f"{self.folder} holds no whole checkpoint, so there is nothing to resume; start a new run")

    def _restore_generators(self, checkpoint: Path) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        new = not _generators(checkpoint, rank).is_file()
        if new:
            rng_state.derive(json.loads(_generators(checkpoint, 0).read_text()), rank)
        else:
            rng_state.restore(json.loads(_generators(checkpoint, rank).read_text()))
        ranks = [str(rank) for rank, is_new in enumerate(gather_json(new)) if is_new]
        if ranks:
            self._note(f"ranks {', '.join(ranks)} are new: their random generators are seeded from rank 0's")


def _generators(checkpoint: Path, rank: int) -> Path:
    return checkpoint / "generators" / f"rank_{rank:05d}.json"


def check_resumable(run: Path, model: PretrainedConfig, actor: EngineConfig) -> None:
    """Refuses to resume a run whose newest checkpoint does not fit the model, before anything is started.

    Of a run with adapters, a checkpoint has these alone.

    Compares file sizes, and the content of the facts that are read here. `Saver.restore` verifies all content, shared
    out over the ranks.

    Raises:
        UserError: no checkpoint is whole, or its format is newer, or its model or dtype another.
    """
    adapters = shape_of(actor.lora)
    trained = model if adapters is None else with_adapters(model, adapters)
    why = "there is none"
    for folder in manifest.step_folders(run / "checkpoints"):
        try:
            read = manifest.read(folder)
            read.check_sizes()
            if (facts := f"{ACTOR}/{FACTS}") in read.files:
                read.check_file(facts)
        except Damaged as error:
            why = f"{folder.name}: {error}" if why == "there is none" else why
            continue
        check_facts(folder / ACTOR, trained, actor.dtype)
        return
    raise UserError(f"resume={run} holds no whole checkpoint ({why}), so there is nothing to resume; start a new run")
