"""Progress display of a run: a live view in a terminal, otherwise one line per step."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.observe import metrics
from megarl.observe.timers import StageTimes, clock

SPARKS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 24


def wrapped(line: str, width: int, indent: int = 10) -> str:
    """Breaks a line at words, to `width` columns, and indents what follows. Paths and commands stay whole."""
    return textwrap.fill(
        line, max(width, 2 * indent), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def print_wrapped(line: str) -> None:
    """Prints a line of a name and its text. In a terminal it is wrapped; a file or pipe gets it whole."""
    print(wrapped(line, shutil.get_terminal_size().columns) if sys.stdout.isatty() else line, flush=True)


class Progress:
    """Display of a run with `total_steps` steps. Use it as a context manager: leaving it restores the terminal.

    `done_steps` is the number of steps before a resume. The first `update` of a new run may be for step 0, with the
    accuracy before training. It may be called before the context is entered.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        done_steps: int = 0,
        console: Console | None = None,
        *,
        accuracies: Sequence[tuple[int, float]] = (),
        is_alone: bool = True,
    ) -> None:
        """Begins with the `accuracies` by step before a resume.

        A run that is not alone in its process has lines, which begin with its title.
        """
        self.console = console or Console()
        self._prefix = "" if is_alone else f"{title}  "
        self._title = title
        self._total = total_steps
        self._step = done_steps
        self._times = StageTimes()
        self._stats: dict[str, float] = {}
        self._rewards: list[float] = []
        self._accuracies = [*accuracies]
        self._synced: int | None = None
        self._start = self._last_update = time.monotonic()
        live = is_alone and self.console.file.isatty() and not self.console.is_dumb_terminal
        self._live = Live(self, console=self.console, refresh_per_second=4) if live else None

    def __enter__(self) -> Progress:
        self._start = self._last_update = time.monotonic()
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, message: str) -> None:
        """Prints a line, above the live view if there is one. In a terminal it is wrapped at words."""
        text = wrapped(message, self.console.width) if self.console.is_terminal else message
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, step: int, stats: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step. `step` counts finished steps; `metrics.py` has the metrics' names."""
        now = time.monotonic()
        if step > self._step:
            self._times.record(stats, now - self._last_update)
        self._step, self._last_update = step, now
        self._stats.update(stats)
        if metrics.REWARD in stats:
            self._rewards.append(stats[metrics.REWARD])
        if metrics.ACCURACY in stats:
            self._accuracies.append((step, stats[metrics.ACCURACY]))
        if stats.get(metrics.SYNC_VERIFIED) == 1:
            self._synced = step
        if self._live is None:  # the live view redraws itself
            self.note(self.line())

    def line(self) -> str:
        """Formats the last step as one line, for logs."""
        parts = [f"{self._prefix}step {self._step}/{self._total}"]
        parts += [f"{name} {value}" for name, value in self._numbers()]
        if times := self._times.last():
            parts.append("time " + ", ".join(f"{name} {seconds:.2f}s" for name, seconds in times.items()))
        parts.append(f"ETA {self._eta()}")
        return "  ".join(parts)

    def __rich__(self) -> RenderableType:
        return Panel(
            Group(self._steps(), *self._curve(), self._numbers_table(), *self._stages()),
            title=self._title,
            title_align="left",
            border_style="dim",
            width=min(self.console.width, 96),
        )

    def _numbers(self) -> list[tuple[str, str]]:
        """Latest values as (name with unit, value) pairs, in a fixed order."""
        stats, numbers = self._stats, []
        if metrics.REWARD in stats:
            numbers.append(("reward", f"{stats[metrics.REWARD]:.3f}"))
        elif metrics.LOSS in stats:
            numbers.append(("loss", f"{stats[metrics.LOSS]:.4f}"))
        if self._accuracies:
            step, value = self._accuracies[-1]
            first = f"{self._accuracies[0][1]:.1%} -> " if len(self._accuracies) > 1 else ""
            numbers.append(("held-out accuracy", f"{first}{value:.1%} (step {step})"))
        if metrics.MARGIN in stats:
            numbers.append(("held-out margin", f"{stats[metrics.MARGIN]:.4f}"))
        if metrics.ROLLOUT_TOKENS_PER_S in stats:
            numbers.append(("rollout tokens/s", f"{stats[metrics.ROLLOUT_TOKENS_PER_S]:,.0f}"))
        if metrics.TRAIN_TOKENS_PER_S in stats:
            numbers.append(("train tokens/s", f"{stats[metrics.TRAIN_TOKENS_PER_S]:,.0f}"))
        if metrics.STALENESS in stats:
            numbers.append(("staleness", f"{stats[metrics.STALENESS]:.2f} versions"))
        if metrics.SYNC_VERIFIED in stats:
            numbers.append(("sync verified", "none yet" if self._synced is None else f"step {self._synced}"))
        return numbers

    def _eta(self) -> str:
        seconds = self._times.eta_s(self._total - self._step)
        if seconds is None:
            return "after the first step"
        return clock(seconds - (time.monotonic() - self._last_update))

    def _steps(self) -> RenderableType:
        row = Table.grid(padding=(0, 2))
        elapsed = clock(time.monotonic() - self._start)
        row.add_row(
            ProgressBar(total=max(self._total, 1), completed=self._step, width=40),
            Text(f"step {self._step}/{self._total}", style="bold"),
            Text(f"{elapsed} elapsed, ETA {self._eta()}", style="dim"),
        )
        return row

    def _curve(self) -> list[RenderableType]:
        if len(self._rewards) < 2:
            return []
        return [Text.assemble(("reward  ", "dim"), (sparkline(self._rewards, 60), "green"))]

    def _numbers_table(self) -> RenderableType:
        numbers = self._numbers()
        if not numbers:
            return Text("waiting for the first step", style="dim")
        table = Table.grid(padding=(0, 3))
        for start in range(0, len(numbers), 3):
            table.add_row(*(Text.assemble((name + " ", "dim"), value) for name, value in numbers[start : start + 3]))
        return table

    def _stages(self) -> list[RenderableType]:
        times = self._times.median()
        if not times:
            return []
        longest, total = max(times.values()), sum(times.values())
        table = Table.grid(padding=(0, 1))
        for name, seconds in times.items():
            filled = round(BAR_WIDTH * seconds / longest) if longest else 0
            share = seconds / total if total else 0.0
            bar = Text("█" * filled + " " * (BAR_WIDTH - filled), style="cyan")
            table.add_row(Text(name, style="dim"), bar, f"{seconds:6.2f}s", Text(f"{share:4.0%}", style="dim"))
        return [table]


def sparkline(values: list[float], width: int) -> str:
    """Draws values as one row of at most `width` block characters, each the mean of its values."""
    count = min(width, len(values))
    bounds = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    if not high > low:
        return SPARKS[0] * count
    return "".join(SPARKS[round((mean - low) / (high - low) * (len(SPARKS) - 1))] for mean in means)
