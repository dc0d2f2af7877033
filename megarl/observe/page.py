"""Writes the report of a run: a page that loads nothing, with the dashboard's parts, and the timeline's trace."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.knobs import UserError
from megarl.observe.board import samples
from megarl.observe.board.curves import CHARTS
from megarl.observe.board.document import document, style
from megarl.observe.board.run_data import RunData
from megarl.observe.board.samples import SampleQuery
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder

MAX_SAMPLES = 400  # of the last evaluation, and as many of the last trained ones
TIMELINE_STEPS = 3  # the last ones
STYLE = style()  # for other reports of the project


def write_page(folder: Path, states: Sequence[Sequence[str]] = ()) -> Path:
    """Writes `report.html` and, of a run with a timeline, `trace.json` into the run's folder. Returns the page's path.

    `states` are rows of a name, a state, and the last line of a log, for each rank and server.

    Raises:
        UserError: the folder has no metrics, or a line of them is damaged.
    """
    run = RunFolder(folder.resolve())
    if not run.metrics.is_file():
        raise UserError(f"{folder} has no {run.metrics.name}; give the folder of a run, such as runs/gsm8k_grpo/latest")
    read_metrics(run.metrics)
    data = RunData(run)
    overview = data.overview()
    counts = _sample_counts(data, overview)
    steps = overview["timeline_steps"]
    answers: dict[str, Any] = {
        "curves": data.curves(),
        "run": overview,
        "state": {"states": states},
        "samples": _samples(data, counts),
        "sample_counts": counts,
        "timeline": data.timeline(steps[-1] - TIMELINE_STEPS + 1, steps[-1]) if steps else {},
    }
    overview["sources"] = list(counts)
    title = run.path.parent.name
    embedded = {
        "live": False,
        "charts": CHARTS,
        "title": title,
        "name": f"{run.path.name}, page written {time.strftime('%Y-%m-%d %H:%M')}",  # where the states' ages end
        "place": "",
        "runs": [{"id": ".", "name": title}],
        "answers": answers,
    }
    page = run.path / "report.html"
    page.write_text(document(f"{title}: megarl run", embedded), "utf-8")
    if steps:
        with (run.path / "trace.json").open("w", encoding="utf-8") as file:
            file.writelines(trace_text(data))
    return page


def trace_text(data: RunData) -> Any:
    """Yields the text of the run's trace, in Chrome's format."""
    yield '{"displayTimeUnit": "ms", "traceEvents": ['
    for number, event in enumerate(data.trace()):
        yield (",\n" if number else "\n") + json.dumps(event)
    yield "\n]}\n"


def _sample_counts(data: RunData, overview: dict[str, Any]) -> dict[str, int]:
    """Number of samples of the last evaluation and of the trained ones, by source."""
    evaluations = [name for name in overview["sources"] if name != samples.TRAINING][:1]
    trained = [name for name in overview["sources"] if name == samples.TRAINING]
    return {name: data.find_samples(name, SampleQuery(count=0))["all"] for name in (*evaluations, *trained)}


def _samples(data: RunData, counts: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """The first samples of the last evaluation and the last trained ones, at most MAX_SAMPLES of each."""
    found = {}
    for name in counts:
        start = max(0, counts[name] - MAX_SAMPLES) if name == samples.TRAINING else 0
        pages: list[dict[str, Any]] = []
        while start is not None and len(pages) < MAX_SAMPLES:
            answer = data.find_samples(name, SampleQuery(start=start, count=MAX_SAMPLES - len(pages)))
            pages += answer["samples"]
            start = answer["next"]
        found[name] = pages
    return found
