"""Results of a run: `curve.png`, `summary.json` and the lines printed at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.knobs import UserError
from megarl.observe import metrics
from megarl.observe.logger import read_metrics, replace_text
from megarl.observe.run_folder import RunFolder
from megarl.observe.timers import clock

INK, FAINT, ACCURACY_COLOR, TREND_COLOR = "#1f2933", "#9aa5b1", "#1769aa", "#2e7d32"


def draw_curve(source: Path | Sequence[Mapping[str, float]], path: Path, title: str = "") -> None:
    """Draws held-out accuracy and margin, training reward and loss over steps into a PNG, as far as they exist.

    `source` is a `metrics.jsonl` or its rows. The loss is drawn only without a reward, because in RL it says little.

    Raises:
        UserError: the metrics have none of the curves.
    """
    rows = read_metrics(source) if isinstance(source, Path) else source
    keys = (metrics.ACCURACY, metrics.MARGIN, metrics.REWARD, metrics.LOSS)
    accuracy, margin, reward, loss = (_series(rows, key) for key in keys)
    panels: list[Callable[[Any], None]] = []
    if accuracy:
        panels.append(lambda axes: _draw_accuracy(axes, accuracy))
    if margin:
        panels.append(lambda axes: _draw_trend(axes, margin, "Held-out margin", "reward of chosen less rejected"))
    if reward:
        panels.append(lambda axes: _draw_trend(axes, reward, "Training reward", "mean reward of a step's completions"))
    elif loss:
        panels.append(lambda axes: _draw_trend(axes, loss, "Training loss", "mean loss"))
    if not panels:
        names = f"{metrics.ACCURACY}, {metrics.REWARD} or {metrics.LOSS}"
        raise UserError(f"{len(rows)} steps have none of {names}, so there is nothing to draw")

    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels), 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, fontsize=11)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, draw in zip(all_axes, panels, strict=True):
        draw(axes)
        axes.set_xlabel("training steps", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Writes `summary.json` atomically and returns its path. Numbers that are not finite become null."""
    path = RunFolder(Path(run_dir)).summary
    replace_text(path, json.dumps(_without_nan(summary), indent=2, allow_nan=False) + "\n")
    return path


def summary_lines(summary: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Lines printed at the end of a run. Values that `summary` lacks are skipped."""
    run, lines = RunFolder(Path(run_dir)), []
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if before is not None and after is not None:
        problems = summary.get("accuracy_problems")
        unit = "problems" if "margin_after" not in summary else "rows"
        over = f" on {problems} held-out {unit}" if problems else ""
        lines.append(f"accuracy  {before:.1%} before, {after:.1%} after ({(after - before) * 100:+.1f} points){over}")
    if summary.get("margin_before") is not None and summary.get("margin_after") is not None:
        lines.append(f"margin    {summary['margin_before']:.4f} before, {summary['margin_after']:.4f} after")
    if "steps" in summary:
        first = summary.get("time_to_first_step_s")
        start = f", the first after {clock(first)}" if first is not None else ""
        lines.append(f"steps     {summary['steps']} in {clock(summary['wall_s'])}{start}")
    if summary.get("tokens_per_s_rollout") is not None:
        rollout, train = summary["tokens_per_s_rollout"], summary.get("tokens_per_s_train", math.nan)
        lines.append(f"speed     {rollout:,.0f} tokens/s in rollout, {train:,.0f} tokens/s in training")
    if summary.get("weights_verified") is not None:
        lines.append(f"weights   {summary['weights_verified']} syncs proven equal on the servers")
    if summary.get("max_rollout_train_logprob_diff") is not None:
        difference = summary["max_rollout_train_logprob_diff"]
        lines.append(f"log-probs rollout and trainer differ by at most {difference:.1e}")
    lines.append(f"folder    {run.path}" + (f" ({run.curve.name} shows the curve)" if run.curve.exists() else ""))
    if run.metrics.exists():
        lines.append(f"read it   python -m megarl.report {run.path}")
    return lines


def _series(rows: Sequence[Mapping[str, float]], key: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[key]) for row in rows if key in row and math.isfinite(row[key])]


def _draw_accuracy(axes: Any, series: list[tuple[int, float]]) -> None:
    steps, values = zip(*((step, value * 100) for step, value in series), strict=True)
    axes.plot(steps, values, color=ACCURACY_COLOR, marker="o", markersize=5, linewidth=2)
    axes.set_title("Held-out accuracy", loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_ylabel("solved, or in order (%)", color=INK)
    low, high = min(values), max(values)
    padding = max(5.0, 0.25 * (high - low))
    axes.set_ylim(max(0.0, low - padding), min(105.0, high + padding))
    if len(series) < 2:
        return
    axes.margins(x=0.12)
    reach = (steps[-1] - steps[0]) / 3  # width of a label, in steps
    first = sum(step <= steps[0] + reach for step in steps) + 1  # points beside a label, and the next one
    last = sum(step >= steps[-1] - reach for step in steps) + 1
    for index, beside, word in ((0, values[:first], "before"), (-1, values[-last:], "after")):
        up = values[index] >= sum(beside) / len(beside)  # label on the side away from the line
        axes.annotate(
            f"{word} {values[index]:.1f}%",
            (steps[index], max(beside) if up else min(beside)),
            xytext=(0, 11 if up else -11),
            textcoords="offset points",
            ha="left" if index == 0 else "right",
            va="bottom" if up else "top",
            color=ACCURACY_COLOR,
            fontweight="bold",
        )
    axes.set_title(f"{values[-1] - values[0]:+.1f} points", loc="right", color=INK, fontsize=11)


def _draw_trend(axes: Any, series: list[tuple[int, float]], title: str, ylabel: str) -> None:
    steps, values = zip(*series, strict=True)
    window = max(1, len(values) // 12)
    axes.plot(steps, values, color=TREND_COLOR, alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, _trailing_mean(values, window), color=TREND_COLOR, linewidth=2, label=f"mean of {window} steps")
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_ylabel(ylabel, color=INK)
    if window > 1:
        axes.legend(frameon=False, labelcolor=INK)


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - window) : i + 1]]]


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
