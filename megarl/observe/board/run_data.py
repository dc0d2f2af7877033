"""Everything that a page shows of one run, as JSON values."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.observe import metrics
from megarl.observe.board import samples
from megarl.observe.board.curves import Curves, is_number
from megarl.observe.board.growing_file import GrowingFile, json_object, last_line, line_at
from megarl.observe.board.samples import SampleFile, SampleQuery
from megarl.observe.run_folder import RunFolder
from megarl.observe.timeline import in_rows, trace_events
from megarl.observe.timers import clock

LIVE_S = 120.0  # a run without a summary that wrote nothing for this long is called quiet
MAX_SPANS = 6000  # of one answer; shorter ones are left out first
MAX_TIMELINE_STEPS = 50  # of one answer
MAX_REASONS, MAX_REASON = 50, 160  # reasons of rejected prompts, and characters of one
MAX_CONFIG = 200_000  # characters


class RunData:
    """One run's files, read as they grow. Threads take turns."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._curves = Curves(folder.metrics)
        self._accounts = Accounts(folder.episodes)
        self._samples: dict[str, SampleFile] = {}
        self._timelines: dict[str, TimelineFile] = {}

    def curves(self, have: str = "") -> dict[str, Any]:
        """Points of every metric; only the stamp if the caller has them."""
        with self._lock:
            self._curves.refresh()
            stamp = self._curves.stamp
            if stamp == have:
                return {"stamp": stamp}
            return {
                "stamp": stamp,
                "series": self._curves.series(),
                "stages": self._curves.stages(),
                "hours": self._curves.hours(),
                "damaged": self._curves.file.damaged,
            }

    def overview(self) -> dict[str, Any]:
        """Facts, timings, prompts, sync plan and configuration, and what else there is to ask for."""
        with self._lock:
            self._curves.refresh()
            self._accounts.refresh()
            self._read_timelines()
            summary = json_object(self.folder.summary)
            steps = sorted({int(step) for file in self._timelines.values() for step in file.steps})
            return {
                "facts": facts(summary, int(self._curves.ends[-1]) if self._curves.rows else 0),
                "timings": self._curves.timings(),
                "accounts": self._accounts.shown(),
                "sources": list(samples.sources(self.folder)),
                "timeline_steps": steps,
                "plan": json_object(self.folder.sync_plan),
                "profiles": sorted(path.name for path in self.folder.profiles.glob("*.json.gz")),
                "config": text_of(self.folder.config),
            }

    def find_samples(self, source: str, query: SampleQuery) -> dict[str, Any]:
        """A page of samples; none of a source that the run lacks."""
        path = samples.sources(self.folder).get(source)
        if path is None:
            return {"samples": [], "next": None, "matching": 0, "all": 0}
        with self._lock:
            file = self._samples.setdefault(source, SampleFile(path))
            file.refresh()
            return file.find(query)

    def timeline(self, first: int, last: int) -> dict[str, Any]:
        """Spans and loads of the steps `first` to `last`, Unix seconds; at most MAX_TIMELINE_STEPS steps, the last."""
        with self._lock:
            self._read_timelines()
            newest = int(max((step for file in self._timelines.values() for step in file.steps), default=last))
            last = min(last, newest)
            first = max(first, last - MAX_TIMELINE_STEPS + 1)
            lanes: dict[tuple[str, str, int], list[list[Any]]] = {}
            loads: dict[str, list[list[float]]] = {}
            left_out = 0
            for process, file in self._timelines.items():
                lines = list(file.lines(first, last))
                spans = [(name, lane, start, end) for line in lines for name, lane, start, end in line["spans"]]
                left_out += sum(line.get("left_out", 0) for line in lines)
                for name, lane, start, end, row in in_rows(spans):
                    lanes.setdefault((process, lane, row), []).append([name, start, end])
                for line in lines:
                    for server, entries in line["loads"].items():
                        loads.setdefault(server, []).extend(entries)
        return {
            "first": first,
            "last": last,
            "loads": loads,
            **_longest(lanes, left_out),
        }

    def trace(self) -> Iterator[dict[str, Any]]:
        """Yields the whole timeline in Chrome's trace format."""
        with self._lock:
            self._read_timelines()
            files = dict(self._timelines)
        for number, (process, file) in enumerate(sorted(files.items())):
            yield from trace_events(process, number, file.lines(0, float("inf")))

    def _read_timelines(self) -> None:
        for path in sorted(self.folder.timeline.glob("rank_*.jsonl"), key=_rank):
            self._timelines.setdefault(path.stem.replace("_", " "), TimelineFile(path)).refresh()


class TimelineFile:
    """Places of the lines of a process's timeline, by step. Of a step that was taken twice, the later line counts."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self._resets = 0
        self.steps, self.offsets, self.lengths = array("d"), array("q"), array("q")

    def refresh(self) -> None:
        """Reads the lines that came since the last call."""
        for offset, length, values in self.file.new_lines():
            if self.file.resets != self._resets:
                self._resets = self.file.resets
                self.steps, self.offsets, self.lengths = array("d"), array("q"), array("q")
            if _is_timeline(values):
                self.steps.append(values["step"])
                self.offsets.append(offset)
                self.lengths.append(length)

    def lines(self, first: float, last: float) -> Iterator[dict[str, Any]]:
        """Yields the lines of the steps `first` to `last`."""
        places: dict[float, list[int]] = {}
        for n, step in enumerate(self.steps):
            if first <= step <= last:
                if places and step < max(places):  # resumed: the steps from here on were taken again
                    places = {known: of_step for known, of_step in places.items() if known < step}
                places.setdefault(step, []).append(n)
        for of_step in places.values():
            for n in of_step:
                line = line_at(self.file.path, self.offsets[n], self.lengths[n])
                if line is not None and _is_timeline(line):
                    yield line


class Accounts:
    """Number of trained prompts, and how often each reason left prompts or samples out."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self._resets = 0
        self.trained = 0
        self.reasons = Counter[str]()

    def refresh(self) -> None:
        """Reads the lines that came since the last call."""
        for _, _, entry in self.file.new_lines():
            if self.file.resets != self._resets:
                self._resets, self.trained = self.file.resets, 0
                self.reasons.clear()
            if "rejected" in entry:
                self.reasons[f"prompt rejected: {str(entry['rejected'])[:MAX_REASON]}"] += 1
            else:
                self.trained += 1
            for reason, count in dict(entry.get("dropped", {})).items():
                self.reasons[f"sample left out: {reason[:MAX_REASON]}"] += int(count)

    def shown(self) -> dict[str, Any]:
        """Values for the page: the MAX_REASONS most frequent reasons."""
        exists = self.file.path.is_file()
        return {"trained": self.trained, "reasons": self.reasons.most_common(MAX_REASONS)} if exists else {}


def listed(folder: RunFolder) -> dict[str, Any]:
    """A run's line in the list of runs. Reads the ends of its files only. A step that is no number is `damaged`."""
    summary, last = json_object(folder.summary), last_line(folder.metrics)
    last = {"step": 0} if last is None else last
    step, steps = last.get("step"), summary.get("steps", 0)
    modified = folder.metrics.stat().st_mtime if folder.metrics.is_file() else 0.0
    age = time.time() - modified if modified else None
    if not is_number(step) or not is_number(steps):
        state, step = "damaged", step if is_number(step) else 0
    elif summary and steps >= step:
        state = "stopped" if summary.get("stopped_early") else "finished"
    else:
        state = "starting" if age is None else "running" if age < LIVE_S else "quiet"
    figures = {
        name: last[name] for name in (metrics.ACCURACY, metrics.REWARD, metrics.LOSS) if is_number(last.get(name))
    }
    if is_number(summary.get("accuracy_after")):
        figures[metrics.ACCURACY] = summary["accuracy_after"]
    experiment = str(summary.get("experiment", folder.path.parent.name))
    return {"experiment": experiment, "state": state, "step": step, "age_s": age, "figures": figures}


def facts(summary: dict[str, Any], last_step: int) -> list[tuple[str, str]]:
    """Headline figures of a run as (name, text)."""
    found: list[tuple[str, str]] = [("steps", str(summary.get("steps", last_step)))]
    if is_number(summary.get("wall_s")):
        found.append(("wall time", clock(summary["wall_s"])))
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if is_number(after):
        found.append(("held-out accuracy", f"{before:.1%} → {after:.1%}" if is_number(before) else f"{after:.1%}"))
    for key, label, form in (
        ("weights_verified", "syncs proven equal", "{:,.0f}"),
        ("max_rollout_train_logprob_diff", "largest log-prob difference", "{:.1e} nats"),
        ("tokens_per_s_rollout", "rollout tokens/s", "{:,.0f}"),
        ("tokens_per_s_train", "train tokens/s", "{:,.0f}"),
        ("final_loss", "last loss", "{:.4f}"),
    ):
        if is_number(summary.get(key)):
            found.append((label, form.format(summary[key])))
    return found


def text_of(path: Path) -> str:
    """The text of a file, cut at MAX_CONFIG characters; "" if it is missing."""
    try:
        return path.read_bytes()[: 4 * MAX_CONFIG].decode("utf-8", errors="replace")[:MAX_CONFIG]
    except OSError:
        return ""


def _longest(lanes: dict[tuple[str, str, int], list[list[Any]]], left_out: int) -> dict[str, Any]:
    """Lanes with the MAX_SPANS longest spans, and the number of spans left out."""
    lengths: list[float] = sorted((end - start for spans in lanes.values() for _, start, end in spans), reverse=True)
    least = lengths[MAX_SPANS] if len(lengths) > MAX_SPANS else -1.0
    shown: list[dict[str, Any]] = [
        {"process": process, "lane": lane, "row": row, "spans": [span for span in spans if span[2] - span[1] > least]}
        for (process, lane, row), spans in lanes.items()
    ]
    kept = sum(len(lane["spans"]) for lane in shown)
    return {"lanes": shown, "left_out": left_out + len(lengths) - kept}


def _is_timeline(values: dict[str, Any]) -> bool:
    return isinstance(values.get("step"), int) and isinstance(values.get("spans"), list) and "loads" in values


def _rank(path: Path) -> int:
    digits = path.stem.removeprefix("rank_")
    return int(digits) if digits.isdecimal() else -1
