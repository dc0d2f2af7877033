"""The acceptance's report: `report.json`, and the same as Markdown and HTML."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from acceptance.plan import Machine
from acceptance.runner import FAILED, Result
from megarl.doctor import machine as described
from megarl.observe.page import STYLE
from megarl.versions import gpus, versions

COLORS = {"passed": "solved", "failed": "wrong", "skipped": ""}  # classes of the run page's style


def collect(machine: Machine, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": machine.device,
        "gpus": machine.gpus,
        "machine": described(gpus()),
        "gpu_names": list(gpus().names[: machine.gpus]),
        "driver": gpus().driver,
        "versions": {name: version for name, version in versions().items() if version},
        "seconds": round(seconds, 1),
        "steps": [result.as_json() for result in results],
    }


def failed(report: dict[str, Any]) -> list[str]:
    """Names of the steps that failed."""
    return [step["name"] for step in report["steps"] if step["status"] == FAILED]


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the three files and returns their paths."""
    texts = {
        "report.json": json.dumps(report, indent=1) + "\n",
        "report.md": markdown(report),
        "report.html": page(report),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def shown(value: float, unit: str) -> str:
    """A figure with its unit, at the precision that is read."""
    if unit == "share":
        return f"{value:.1%}" if value >= 0.001 else f"{value:.1e}"
    if unit == "nats":
        return f"{value:.1e} nats"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e9):
        number = f"{value:,.0f}"
    else:
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number}x" if unit == "x" else f"{number} {unit}"


def labels_of(figure: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in figure.items() if key not in ("figure", "value", "unit"))


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    counts = {status: sum(step["status"] == status for step in report["steps"]) for status in COLORS}
    return [
        ("machine", report["machine"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
        ("date", report["date"]),
        ("time", f"{report['seconds']:.0f} s"),
        ("steps", ", ".join(f"{count} {status}" for status, count in counts.items())),
    ]


def _step_rows(report: dict[str, Any]) -> Iterable[tuple[str, str, str, str, str]]:
    """Name, status, seconds, proof, and the reason or the log of each step."""
    for step in report["steps"]:
        yield step["name"], step["status"], f"{step['seconds']:g} s", step["proves"], step["reason"] or step["log"]


def _figure_rows(report: dict[str, Any]) -> Iterable[tuple[str, str, str, str]]:
    for step in report["steps"]:
        for figure in step["figures"]:
            yield step["name"], figure["figure"], labels_of(figure), shown(figure["value"], figure["unit"])


STEP_HEAD = ("step", "result", "time", "proves", "reason or log")
FIGURE_HEAD = ("step", "figure", "of", "value")


def markdown(report: dict[str, Any]) -> str:
    def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
        lines = [head, ["---"] * len(head), *rows]
        return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]

    facts = [f"- **{name}**: {value}" for name, value in _facts(report)]
    parts = [
        *("# GPU acceptance", "", *facts, "", "## Steps", "", *table(STEP_HEAD, _step_rows(report)), ""),
        *("## Figures", "", *table(FIGURE_HEAD, _figure_rows(report)), "", "## Commands", "", "```"),
        *(step["command"] for step in report["steps"]),
        "```",
    ]
    return "\n".join(parts) + "\n"


def page(report: dict[str, Any]) -> str:
    """The report as one HTML page in the style of a run's page, without any request to another host."""

    def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        lines = []
        for row in rows:
            cells = (f"<td class='{COLORS.get(cell, '')}'>{html.escape(cell)}</td>" for cell in row)
            lines.append(f"<tr>{''.join(cells)}</tr>")
        heads = "".join(f"<th>{cell}</th>" for cell in head)
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

    facts = "".join(f"<p><b>{html.escape(name)}</b> {html.escape(value)}</p>" for name, value in _facts(report))
    commands = html.escape("\n".join(step["command"] for step in report["steps"]))
    body = (
        f"<h1>GPU acceptance</h1>{facts}<h2>Steps</h2>{table(STEP_HEAD, _step_rows(report))}"
        f"<h2>Figures</h2>{table(FIGURE_HEAD, _figure_rows(report))}<h2>Commands</h2><pre>{commands}</pre>"
    )
    head = f"<meta charset='utf-8'><title>megarl: GPU acceptance</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"
