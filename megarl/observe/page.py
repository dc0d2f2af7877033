"""Self-contained HTML page of a run: curves, timings, syncs, staleness, samples, and rejected prompts."""

from __future__ import annotations

import html
import io
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.knobs import UserError
from megarl.observe import metrics
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.observe.timers import clock

MAX_SAMPLES = 400  # shown of the last evaluation
INK, GRID, COLORS = "#1f2933", "#e4e7eb", ("#1769aa", "#2e7d32", "#b45309", "#7b1fa2", "#c62828", "#00838f", "#5d4037")

# Title, unit, and metrics with their labels. A chart is skipped if the run has none of its metrics.
CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Held-out accuracy", "part of problems solved", {metrics.ACCURACY: "held out"}),
    ("Training reward", "mean reward of a step", {metrics.REWARD: "reward"}),
    ("Preferences in order", "part of pairs", {"train/accuracy": "trained", "eval/pair_accuracy": "held out"}),
    ("Margin", "reward of chosen less rejected", {"train/margin": "trained"}),
    ("Loss", "mean of the step", {metrics.LOSS: "policy or model", "train/critic_loss": "critic"}),
    ("Gradient norm", "before clipping", {"train/grad_norm": "norm"}),
    ("Entropy", "nats a token", {"train/entropy": "entropy"}),
    ("Clipped tokens", "part of tokens", {"train/clip_fraction": "clipped"}),
    (
        "Rollout against trainer",
        "nats, |difference| of log-probs",
        {"train/logprob_diff_max": "largest", "train/logprob_diff_mean": "mean"},
    ),
    ("KL of rollout and trainer", "nats a token", {"train/rollout_kl": "KL"}),
    ("Staleness", "versions", {metrics.STALENESS: "mean", "rollout/staleness_max": "largest"}),
    ("Completion length", "tokens", {"rollout/completion_len": "mean", "rollout/completion_len_max": "longest"}),
    ("Speed", "tokens a second", {metrics.ROLLOUT_TOKENS_PER_S: "rollout", metrics.TRAIN_TOKENS_PER_S: "training"}),
    ("Weight syncs", "MB sent", {"sync/mbytes": "sent"}),
    ("Left out", "a step", {"rollout/rejected": "prompts", "rollout/dropped_samples": "samples"}),
)
STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; margin: 0 auto; max-width: 1180px; padding: 24px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 18px; margin: 32px 0 8px }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0 }
.fact { border: 1px solid #e4e7eb; border-radius: 8px; padding: 8px 14px } .fact b { display: block; font-size: 20px }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); gap: 16px }
.charts svg { width: 100%; height: auto } table { border-collapse: collapse; width: 100%; font-size: 13px }
td, th { border-bottom: 1px solid #e4e7eb; padding: 6px 8px; text-align: left; vertical-align: top }
th { position: sticky; top: 0; background: #fff }
pre { white-space: pre-wrap; word-break: break-word; margin: 0; font-size: 12px }
.solved { color: #2e7d32 } .wrong { color: #c62828 }
input, select { font: inherit; padding: 4px 8px; margin-right: 8px }
@media (max-width: 720px) {
  body { padding: 12px } .charts { grid-template-columns: 1fr } .wide { overflow-x: auto }
  #samples td:nth-child(2), #samples td:nth-child(3) { min-width: 240px }
}
"""
FILTER = """
const rows = [...document.querySelectorAll('#samples tbody tr')];
function filter() {
  const text = document.getElementById('find').value.toLowerCase(), kind = document.getElementById('kind').value;
  let shown = 0;
  for (const row of rows) {
    const fits = (!kind || row.dataset.kind === kind) && row.textContent.toLowerCase().includes(text);
    row.hidden = !fits; shown += fits;
  }
  document.getElementById('count').textContent = shown + ' of ' + rows.length;
}
document.getElementById('find').oninput = document.getElementById('kind').onchange = filter; filter();
"""


def write_page(folder: Path) -> Path:
    """Writes `report.html` into the run's folder and returns its path.

    Raises:
        UserError: the folder has no metrics.
    """
    run = RunFolder(folder.resolve())
    if not run.metrics.is_file():
        raise UserError(f"{folder} has no {run.metrics.name}; give the folder of a run, such as runs/gsm8k_grpo/latest")
    rows = read_metrics(run.metrics)
    summary = json.loads(run.summary.read_text()) if run.summary.is_file() else {}
    name = summary.get("experiment", run.path.parent.name)
    parts = [
        f"<h1>{html.escape(name)}</h1><p>{html.escape(str(run.path.name))}</p>",
        _facts(summary, rows),
        "<h2>Curves</h2><div class='charts'>",
        *(f"<figure style='margin:0'>{chart}</figure>" for chart in _charts(rows)),
        "</div>",
        _timings(rows),
        _accounts(run.path / "episodes.jsonl"),
        _samples(run.path / "evaluations"),
        _config(run.config),
    ]
    page = run.path / "report.html"
    title = html.escape(f"{name}: megarl run")
    viewport = "<meta name='viewport' content='width=device-width'>"
    head = f"<meta charset='utf-8'>{viewport}<title>{title}</title><style>{STYLE}</style>"
    page.write_text(f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>", "utf-8")
    return page


def _facts(summary: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> str:
    facts: list[tuple[str, str]] = [("steps", str(summary.get("steps", int(rows[-1]["step"]) if rows else 0)))]
    if "wall_s" in summary:
        facts.append(("wall time", clock(summary["wall_s"])))
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if before is not None and after is not None:
        facts.append(("held-out accuracy", f"{before:.1%} → {after:.1%}"))
    for key, label, form in (
        ("weights_verified", "syncs proven equal", "{:,.0f}"),
        ("max_rollout_train_logprob_diff", "largest log-prob difference", "{:.1e}"),
        ("tokens_per_s_rollout", "rollout tokens/s", "{:,.0f}"),
        ("tokens_per_s_train", "train tokens/s", "{:,.0f}"),
        ("final_loss", "last loss", "{:.4f}"),
    ):
        if isinstance(summary.get(key), int | float):
            facts.append((label, form.format(summary[key])))
    cells = "".join(f"<div class='fact'><b>{html.escape(v)}</b>{html.escape(k)}</div>" for k, v in facts)
    return f"<div class='facts'>{cells}</div>"


def _charts(rows: Sequence[Mapping[str, float]]) -> Iterator[str]:
    for title, unit, names in CHARTS:
        series = {label: points for name, label in names.items() if (points := _points(rows, name))}
        if series:
            yield _draw(title, unit, series)


def _points(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row and math.isfinite(row[name])]


def _draw(title: str, unit: str, series: Mapping[str, list[tuple[float, float]]], stacked: bool = False) -> str:
    """Draws one chart and returns it as SVG text."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    if stacked:
        steps = [step for step, _ in next(iter(series.values()))]
        axes.stackplot(
            steps, *([v for _, v in points] for points in series.values()), labels=list(series), colors=COLORS
        )
    else:
        for color, (name, points) in zip(COLORS, series.items(), strict=False):
            marker = "o" if len(points) < 25 else None
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.6, marker=marker, markersize=3, label=name)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.set_xlabel("training steps", fontsize=8, color=INK)
    axes.set_ylabel(unit, fontsize=8, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _timings(rows: Sequence[Mapping[str, float]]) -> str:
    """Time per stage of a step: a stacked chart and a table. A line's seconds are divided over the steps it covers."""
    ends = [0.0, *(row["step"] for row in rows)]
    covered = {end: end - before for before, end in itertools.pairwise(ends)}
    steps = [row for row in rows if f"{metrics.TIME}update" in row]
    names = sorted({k for row in steps for k in row if k.startswith(metrics.TIME) and k.count("/") == 1})
    if not steps or not names:
        return ""
    series, lines = {}, []
    for key in names:
        name = key.removeprefix(metrics.TIME)
        series[name] = [(row["step"], row.get(key, 0.0) / covered[row["step"]]) for row in steps]
        values = sorted(row[key] / covered[row["step"]] for row in steps if key in row)  # of steps with the stage
        total = sum(row.get(key, 0.0) for row in steps)
        cells = (name, f"{values[len(values) // 2]:.3f}", f"{values[-1]:.3f}", f"{total:.1f}")
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    table = f"<table><tr><th>stage</th><th>median s</th><th>longest s</th><th>all s</th></tr>{''.join(lines)}</table>"
    chart = _draw("A step's seconds", "seconds", series, stacked=True)
    return f"<h2>Timings</h2><div class='charts'><figure style='margin:0'>{chart}</figure><div>{table}</div></div>"


def _accounts(path: Path) -> str:
    """Number of trained prompts, and the reasons for rejected ones."""
    if not path.is_file():
        return ""
    trained, reasons = 0, Counter[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "rejected" in entry:
            reasons[f"prompt rejected: {entry['rejected'][:120]}"] += 1
        else:
            trained += 1
        for reason, count in entry.get("dropped", {}).items():
            reasons[f"sample left out: {reason}"] += count
    lines = "".join(f"<tr><td>{html.escape(r)}</td><td>{c}</td></tr>" for r, c in reasons.most_common())
    body = f"<table><tr><th>reason</th><th>count</th></tr>{lines}</table>" if lines else "<p>Nothing was left out.</p>"
    return f"<h2>Prompts</h2><p>{trained} prompts trained on.</p>{body}"


def _samples(folder: Path) -> str:
    """Samples of the last evaluation, with search and filter."""
    files = sorted(folder.glob("step-*.jsonl"))
    if not files:
        return ""
    with files[-1].open(encoding="utf-8") as file:
        samples = [json.loads(line) for _, line in zip(range(MAX_SAMPLES), file, strict=False)]
    lines = []
    for sample in samples:
        kind = "solved" if sample["solved"] else "wrong"
        versions = ", ".join(map(str, sample["versions"]))
        texts = "".join(f"<td><pre>{html.escape(sample[key])}</pre></td>" for key in ("prompt", "completion"))
        lines.append(
            f"<tr data-kind='{kind}'><td>{sample['problem']}</td>{texts}<td class='{kind}'>{sample['reward']:g}</td>"
            f"<td>{html.escape(versions)}</td></tr>"
        )
    head = "<tr><th>problem</th><th>prompt</th><th>completion</th><th>reward</th><th>version</th></tr>"
    tools = (
        "<p><input id='find' placeholder='find' aria-label='find'><select id='kind' aria-label='kind'>"
        "<option value=''>all</option><option>solved</option><option>wrong</option></select>"
        "<span id='count'></span></p>"
    )
    table = f"<table id='samples'><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>"
    samples_of = html.escape(files[-1].stem)
    return f"<h2>Samples of {samples_of}</h2>{tools}<div class='wide'>{table}</div><script>{FILTER}</script>"


def _config(path: Path) -> str:
    if not path.is_file():
        return ""
    text = html.escape(path.read_text(encoding="utf-8"))
    return f"<h2>Configuration</h2><details><summary>{path.name}</summary><pre>{text}</pre></details>"
