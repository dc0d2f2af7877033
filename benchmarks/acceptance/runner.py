"""Runs steps one after another: a log each, a deadline each, and no failure stops the ones behind it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from acceptance.plan import BUDGET_S, JUNIT, ROOT, Step, benchmarks_on_path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
POLL_S = 0.05
KILL_DEADLINE_S = 10.0


@dataclass
class Result:
    """The outcome of a step. `figures` have at least `figure`, `value` and `unit`."""

    step: Step
    status: str
    reason: str = ""
    seconds: float = 0.0
    log: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.step.name,
            "proves": self.step.proves,
            "command": self.step.shown(),
            "deadline_s": self.step.deadline_s,
            "status": self.status,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "log": self.log,
            "figures": self.figures,
        }


def run_all(steps: Sequence[Step], folder: Path, budget_s: float = BUDGET_S) -> list[Result]:
    """Runs every step, with its log and figures in `folder`. Steps share `budget_s` seconds."""
    began, results = time.monotonic(), []
    for number, step in enumerate(steps, 1):
        left = budget_s - (time.monotonic() - began)
        result = run(step, folder, number, left, budget_s)
        results.append(result)
        reason = f": {result.reason}" if result.reason else ""
        print(f"[{number}/{len(steps)}] {step.name}: {result.status} after {result.seconds:.0f} s{reason}", flush=True)
    return results


def run(step: Step, folder: Path, number: int, left_s: float, budget_s: float) -> Result:
    """Runs one step within its deadline and the seconds that are left."""
    if step.skip:
        return Result(step, SKIPPED, step.skip)
    if left_s <= 0:
        return Result(step, FAILED, f"not started: the steps before it took all {budget_s / 60:g} minutes")
    name = f"{number:02d}-{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}"
    log, figures = folder / f"{name}.log", folder / f"{name}.{'xml' if step.figures == JUNIT else 'jsonl'}"
    deadline_s = min(step.deadline_s, left_s)
    began = time.monotonic()
    code = _run_command(step, log, figures, deadline_s)
    result = Result(step, PASSED, seconds=time.monotonic() - began, log=log.name)
    try:
        result.figures = read_figures(step, figures) if figures.exists() else []
    except (ValueError, KeyError, ElementTree.ParseError) as error:
        result.status, result.reason = FAILED, f"its figures cannot be read: {error}"
    if code is None:
        result.status, result.reason = FAILED, f"killed at its deadline of {deadline_s:.0f} s"
    elif code != 0:
        result.status, result.reason = FAILED, f"exit code {code}: {_last_line(log)}"
    elif step.figures and not result.reason and (complaint := _incomplete(step, result.figures)):
        result.status, result.reason = FAILED, complaint
    return result


def _run_command(step: Step, log: Path, figures: Path, deadline_s: float) -> int | None:
    """Exit code of the step's command; None if it was killed at the deadline. Nothing that it started outlives it."""
    family: dict[int, psutil.Process] = {}
    with log.open("wb") as output:
        output.write(f"$ {step.shown()}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                step.with_figures(figures),
                cwd=ROOT,
                env=benchmarks_on_path() | step.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            return 127
        ends = time.monotonic() + deadline_s
        try:
            while process.poll() is None and time.monotonic() < ends:
                _remember(process.pid, family)
                time.sleep(POLL_S)
            return process.poll()
        finally:  # also at Ctrl-C
            _kill(process, family)


def _remember(pid: int, family: dict[int, psutil.Process]) -> None:
    """Adds the process's descendants, which can no longer be found once their parents have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family.update((child.pid, child) for child in psutil.Process(pid).children(recursive=True))


def _kill(process: subprocess.Popen[bytes], family: dict[int, psutil.Process]) -> None:
    _remember(process.pid, family)
    if process.poll() is None:
        process.kill()
    for member in family.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()  # a process that took the number of one that ended is left alone
    psutil.wait_procs(list(family.values()), timeout=KILL_DEADLINE_S)
    process.wait(KILL_DEADLINE_S)


def read_figures(step: Step, path: Path) -> list[dict[str, Any]]:
    """Figures that a step wrote: lines of JSON, or pytest's report as counts.

    Raises:
        ValueError: a line is no JSON, or lacks a field.
    """
    if step.figures == JUNIT:
        return _counts(path)
    figures = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        figure = json.loads(line)
        if missing := {"figure", "value", "unit"} - figure.keys():
            raise ValueError(f"line {number} of {path.name} lacks {', '.join(sorted(missing))}")
        figures.append(figure)
    return figures


def _counts(path: Path) -> list[dict[str, Any]]:
    suite = ElementTree.parse(path).getroot().find("testsuite")
    if suite is None:
        raise ValueError(f"{path.name} has no testsuite")
    total, failures, errors, skipped = (int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped"))
    counts = {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    return [{"figure": f"tests {name}", "value": count, "unit": "tests"} for name, count in counts.items()]


def _incomplete(step: Step, figures: list[dict[str, Any]]) -> str:
    """The reason why figures of a command that ended well prove nothing; "" if they do."""
    if not figures:
        return "it ended well and wrote no figure"
    values = {figure["figure"]: figure["value"] for figure in figures}
    if step.figures == JUNIT and not values["tests passed"]:
        return f"no test ran: {values['tests skipped']} were skipped"
    return ""


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200]
