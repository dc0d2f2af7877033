"""Takes one step of a run again: `python -m megarl.replay RUN step=N [keep=DIR] [GROUP=NAME ...] [KNOB=VALUE ...]`.

The run kept the step's batch (`saver.keep_batches`). Its state before the step comes from a checkpoint, and from the
kept batches between that and the step. No server and no data set is needed. Knobs hold for the step itself: the state
before it is the run's own, bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl import cli
from megarl.config import Config
from megarl.knobs import UserError
from megarl.launcher.local import PARENT
from megarl.launcher.replay_ranks import state_before, take_steps
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.processes import die_with_parent
from megarl.trainer.checkpoints import manifest
from megarl.trainer.checkpoints.manifest import Damaged
from megarl.trainer.replay.checks import changed_knobs, check_replay, overrides_of
from megarl.trainer.replay.kept_batches import read_batch
from megarl.trainer.replay.order import FIGURES, STATS, Order, read_order
from megarl.trainer.replay.source import Source, find, whole_checkpoints
from megarl.types import PackedBatch

USAGE = "usage: python -m megarl.replay RUN step=N [keep=DIR] [GROUP=NAME ...] [KNOB=VALUE ...]"
TOLERANCE = 1e-5  # of loss and gradient norm between layouts, relative, in float32
LAYOUT = ("parallel.", "actor.max_tokens_per_mb")  # knobs that change no number but by rounding
WIDTH = 110  # characters of the table, where the output is no terminal


@dataclass(frozen=True)
class Request:
    """The command line."""

    folder: RunFolder
    step: int
    keep: Path | None
    overrides: list[str]


def parse(arguments: Sequence[str]) -> Request:
    """Reads the command line.

    Raises:
        UserError: the run or the step is missing or wrong.
    """
    if not arguments or "=" in arguments[0]:
        raise UserError(USAGE)
    options = {name: value for name, _, value in (argument.partition("=") for argument in arguments[1:])}
    if not options.get("step", "").isdecimal() or int(options["step"]) < 1:
        raise UserError(f"step={options.get('step', '')} must be the number of a step, from 1; {USAGE}")
    overrides = [a for a in arguments[1:] if a.partition("=")[0] not in ("step", "keep")]
    keep = Path(options["keep"]) if "keep" in options else None
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UserError(f"keep={keep} is there and not empty; give a new folder")
    return Request(RunFolder(Path(arguments[0]).resolve()), int(options["step"]), keep, overrides)


@dataclass(frozen=True)
class Replayed:
    """Metrics of the replayed step, and by engine and kind the gaps of the state after it to the run's own."""

    stats: dict[str, float]
    gaps: dict[str, dict[str, list[float]]]

    @property
    def same_state(self) -> bool:
        return not any(gap[0] for kinds in self.gaps.values() for gap in kinds.values())


def take_again(request: Request, source: Source, overrides: list[str], same: bool, work: Path) -> Replayed:
    """Has ranks take the steps from the source. With changed knobs, the state before the step is made without them.

    Raises:
        UserError: the ranks ended early; what they wrote is above.
    """

    state, batches = str(source.checkpoint or ""), [str(path) for path in source.batches]
    if not same:
        state, batches = state_before(source, work), batches[-1:]
    after = whole_checkpoints(request.folder).get(request.step)
    take_steps(Order(overrides, batches, state, compare_to=str(after or "")), work / "step")
    return Replayed(**json.loads((work / "step" / STATS).read_text()))


def own_stats(folder: RunFolder, step: int) -> dict[str, float]:
    """The run's own metrics of a step; {} where no line of metrics is of that step alone."""
    rows = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    before = max((int(row["step"]) for row in rows if row["step"] < step), default=0)
    row = next((row for row in rows if row["step"] == step), None)
    if row is None or before != step - 1:
        return {}
    return {name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")}


def gap_of(name: str, now: float, before: float) -> float:
    """Relative difference of two values of a metric. A loss below 1 counts as 1: GRPO's terms of size 1 cancel."""
    if now == before or (math.isnan(now) and math.isnan(before)):
        return 0.0
    return abs(now - before) / max(abs(now), abs(before), 1.0 if name == "loss" else 0.0)


def table(replayed: Replayed, own: Mapping[str, float]) -> Table:
    """One row a metric of the step, and one a part of the state after it."""
    rows = Table()
    for name in ("", "run", "replay", "difference"):
        rows.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, value in replayed.stats.items():
        known = name in own
        gap = (
            "" if not known else "0" if not gap_of(name, value, own[name]) else f"{gap_of(name, value, own[name]):.1e}"
        )
        rows.add_row(name.replace("_", " "), f"{own[name]:.9g}" if known else "-", f"{value:.9g}", gap)
    for engine, kinds in replayed.gaps.items():
        for kind, (count, largest, scale) in kinds.items():
            gap = f"{largest / scale:.1e}" if count and scale else "0"
            rows.add_row(f"{engine}: {kind} after", "", f"{int(count):,} differ", gap)
    return rows


def verdict(replayed: Replayed, own: Mapping[str, float], changed: Sequence[str]) -> tuple[str, int]:
    """The last line, and the exit code: 1 if a number that must be the run's is not."""
    other = [change for change in changed if not change.startswith(LAYOUT)]
    if other:
        return f"another step: {', '.join(other)}", 0
    if not own:
        return "the run has no line of metrics of this step alone (logger.every_steps=1 writes them)", 0
    compared = {name: gap_of(name, value, own[name]) for name, value in replayed.stats.items() if name in own}
    if not any(compared.values()) and replayed.same_state:
        state = "metrics and state after it" if replayed.gaps else "metrics (the run has no checkpoint after it)"
        return f"bit for bit the run's step: {state}", 0
    gaps = [compared.get(name, 0.0) for name in ("loss", "grad_norm")]
    if not all(gap <= TOLERANCE for gap in gaps):  # NaN is not
        loss, norm = (f"{gap:.1e}" for gap in gaps)
        return f"differs: the loss by {loss} and the gradient norm by {norm}; rounding is at most {TOLERANCE:g}", 1
    if changed:
        return (
            f"the run's step within {TOLERANCE:g}: loss and gradient norm on another layout ({', '.join(changed)})",
            0,
        )
    return f"within {TOLERANCE:g}, not bit for bit: processor, threads or library versions are others than the run's", 0


def replay(request: Request) -> int:
    """Replays the step, prints its table and verdict. Returns the exit code.

    Raises:
        UserError: the step cannot be replayed so.
    """
    source = find(request.folder, request.step)
    overrides = overrides_of(source.facts, request.overrides)
    run, config = cli.load(overrides_of(source.facts)), cli.load(overrides)
    check_replay(run, config, _whole(request, source), source.checkpoint)
    changed = changed_knobs(run, config)
    with tempfile.TemporaryDirectory(prefix="megarl-replay-") as name:
        replayed = take_again(request, source, overrides, not changed, Path(name))
        if request.keep is not None:
            request.keep.mkdir(parents=True, exist_ok=True)
            for file in (STATS, FIGURES):
                shutil.copyfile(Path(name) / "step" / file, request.keep / file)
    own = own_stats(request.folder, request.step)
    line, code = verdict(replayed, own, changed)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(_title(request, source, config), highlight=False, soft_wrap=True)
    console.print(table(replayed, own))
    console.print(line, highlight=False, soft_wrap=True)
    if request.keep is not None:
        console.print(f"figures   {request.keep}", highlight=False, soft_wrap=True)
    return code


def _whole(request: Request, source: Source) -> PackedBatch:
    """Reads and verifies checkpoint and batches. Returns the last batch.

    Raises:
        UserError: one of them is damaged.
    """
    try:
        if source.checkpoint is not None:
            manifest.read(source.checkpoint).check_content()
        return [read_batch(path) for path in source.batches][-1]
    except Damaged as error:
        raise UserError(f"step={request.step} cannot be replayed: {error}; replay another step") from error


def _title(request: Request, source: Source, config: Config) -> str:
    start = f"the checkpoint of step {source.start}" if source.start else "the run's start"
    ranks = config.parallel.world_size()
    return f"step {request.step} of {request.folder.path.name}, from {start}, on {ranks} rank{'s' * (ranks > 1)}"


def command(arguments: list[str]) -> int:
    """Runs the command, or a rank of it."""
    if PARENT not in os.environ:
        return replay(parse(arguments))
    from megarl.trainer.replay import steps  # loads Megatron

    file = Path(arguments[0])
    steps.replay(read_order(file), file.parent)
    return 0


if __name__ == "__main__":
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    cli.exit_with(command, USAGE)
