"""Finds what a step can be taken again from: a state before it, and the kept batches from there to the step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints import manifest
from megarl.trainer.checkpoints.manifest import Damaged
from megarl.trainer.replay.kept_batches import Facts, kept_steps, read_facts


@dataclass(frozen=True)
class Source:
    """Origin of a replayed step: a state of the run, and the batches from there to the step."""

    start: int  # step of the state; 0 is the run's start
    checkpoint: Path | None
    batches: list[Path]  # of the steps after `start`, the last one is replayed
    facts: Facts  # of the last one


def find(folder: RunFolder, step: int) -> Source:
    """Finds the newest state before the step from which kept batches reach it.

    Raises:
        UserError: the folder is no run, or lacks state or batches for the step; names the steps that can be replayed.
    """
    if not folder.config.is_file():
        raise UserError(f"{folder.path} is no run; give its folder, such as runs/gsm8k_grpo/latest")
    kept = kept_steps(folder.batches)
    if not kept:
        raise UserError(f"{folder.path} kept no batches; train with saver.keep_batches=K to replay its last K steps")
    facts = {number: _facts(path) for number, path in kept.items()}
    checkpoints = whole_checkpoints(folder)
    sources = {number: _source(number, kept, facts, checkpoints) for number in kept}
    possible = _ranges([number for number, source in sources.items() if source is not None])
    remedy = f"steps that can be replayed: {possible}" if possible else "no step of this run can be replayed"
    if step not in kept:
        raise UserError(f"step={step}: the run kept the batches of steps {_ranges(list(kept))}; {remedy}")
    source = sources[step]
    if source is None:
        before = max((number for number in checkpoints if number < step), default=0)
        nearest = f"the checkpoint of step {before}" if before else "the run's start"
        raise UserError(
            f"step={step}: the state before it cannot be had: the newest one is {nearest}, and the batches from there "
            f"are not all kept under one configuration; {remedy}"
        )
    return source


def _facts(path: Path) -> Facts | None:
    try:
        return read_facts(path)
    except Damaged:
        return None


def whole_checkpoints(folder: RunFolder) -> dict[int, Path]:
    """Checkpoints by step whose files are all there."""
    found = {}
    for path in manifest.step_folders(folder.checkpoints):
        try:
            read = manifest.read(path)
            read.check_sizes()
        except Damaged:
            continue
        found[read.step] = path
    return found


def _source(
    step: int, kept: dict[int, Path], facts: dict[int, Facts | None], checkpoints: dict[int, Path]
) -> Source | None:
    """Source of a kept step; None without a state from which equal configurations lead to it."""
    own = facts[step]
    if own is None:
        return None
    first = step
    while (before := facts.get(first - 1)) is not None and replace(before, step=step) == own:
        first -= 1
    starts = [number for number in (0, *checkpoints) if first - 1 <= number < step]
    if not starts:
        return None
    start = max(starts)
    return Source(start, checkpoints.get(start), [kept[number] for number in range(start + 1, step + 1)], own)


def _ranges(steps: list[int]) -> str:
    """Steps in words, such as `3-5, 9`."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)
