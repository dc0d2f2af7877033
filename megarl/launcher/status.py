"""Shows a run under any launcher: its job, its last step, each rank and each server. Reads files only.

python -m megarl.launcher.status [RUN]
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import math
import shutil
import subprocess
import time
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl import cli
from megarl.knobs import UserError
from megarl.observe.board.curves import is_number
from megarl.observe.board.growing_file import json_object, last_line
from megarl.observe.run_folder import RunFolder
from megarl.observe.timers import clock
from megarl.parallel.watchdog import Monitor

USAGE = "usage: python -m megarl.launcher.status [RUN], by default the newest run under runs/"
RUNS = Path("runs")
HEALTH_S = 3.0
COMMAND_S = 20.0
LINE = 90  # characters of a log's last line
Ask = Literal["all", "loopback", "none"]  # servers that are asked for their health
SHOWN = ("eval/accuracy", "train/loss", "rollout/reward", "time/step")


def show(arguments: list[str]) -> int:
    """Prints the state of the run in a folder, by default the newest under runs/. Returns the exit code.

    Raises:
        UserError: the folder holds no run.
    """
    folder = RunFolder(Path(arguments[0]) if arguments else _newest())
    if not folder.logs.is_dir():
        raise UserError(f"{folder.path} is not the folder of a run; give one, such as runs/gsm8k_grpo/latest")
    console = Console()
    console.print(view(RunFolder(folder.path.resolve())))
    return 0


def view(folder: RunFolder) -> Table:
    """The state of a run as one table."""
    logs = newest_logs(folder)
    table = Table(title=f"{folder.path} ({logs.name})", title_justify="left")
    for column in ("what", "state", "last line of its log"):
        table.add_column(column, overflow="fold")
    for row in states(folder):
        table.add_row(*(Text(cell) for cell in row))
    return table


def newest_logs(folder: RunFolder) -> Path:
    """The folder of the last attempt's logs."""
    return (folder.logs / "latest").resolve() if (folder.logs / "latest").exists() else folder.logs


def states(folder: RunFolder, ask: Ask = "all") -> list[tuple[str, str, str]]:
    """Rows of a name, a state, and the last line of a log: the job, the run, each rank and each server.

    Unless `ask` is "none", Slurm is asked for the job, and servers that published their address for their health.
    The files of a run may name any address: with "loopback", only servers of this machine are asked.
    """
    logs = newest_logs(folder)
    job = logs / "job" if (logs / "job").is_dir() else logs
    rows: list[tuple[str, str, str]] = []
    if ask != "none" and folder.path.name.startswith("job_"):
        rows.append((folder.path.name.replace("_", " "), _queued(folder.path.name.removeprefix("job_")), ""))
    rows.append(("run", _step(folder), ""))
    watch = job / "watch" if (job / "watch").is_dir() else logs / "watch"
    recorded = folder.timeline.glob("rank_*.jsonl")
    ranks = sorted({_number(path) for path in (*logs.glob("rank_*.log"), *watch.glob("rank_*.watch"), *recorded)})
    monitor = Monitor(watch, len(ranks), timeout_s=0)
    for rank in ranks:
        log = logs / f"rank_{rank}.log"  # rank 0 of a local run wrote to its terminal
        is_watched = (watch / f"rank_{rank}.watch").is_file()
        state = monitor.describe(rank) if is_watched else _last_step(folder.timeline / f"rank_{rank}.jsonl")
        rows.append((f"rank {rank}", state, _tail(log) if log.exists() else ""))
    rows += _asked_servers(folder, ask)
    for log in sorted([*logs.glob("server_*.log"), *logs.glob("sglang-*.log")], key=_number):
        published = job / f"server_{_number(log)}"
        asked = published.is_file() and log.name.startswith("server")
        health = _health(published.read_text(errors="replace"), ask) if asked else ""
        rows.append((log.stem.replace("_", " "), health, _tail(log)))
    return rows


def _newest() -> Path:
    runs = [path for path in RUNS.glob("*/*") if path.is_dir() and not path.is_symlink()]
    if not runs:
        raise UserError(f"there is no run in {RUNS.resolve()}; give the folder of one")
    return max(runs, key=lambda path: path.stat().st_mtime)


def _number(path: Path) -> int:
    digits = path.stem.replace("-", "_").rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1


def _queued(job: str) -> str:
    """The job's state in Slurm's queue."""
    if shutil.which("squeue") is None:
        return "no Slurm here"
    queue = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T for %M of %l on %N %r"],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    return queue.stdout.strip() or "not in the queue"


def _step(folder: RunFolder) -> str:
    """The last step, its age and its figures. Damaged lines and a damaged summary are passed over."""
    last, ended = last_line(folder.metrics), json_object(folder.summary)
    if last is None:
        return "no step yet"
    if not is_number(last.get("step")):
        return f"the last line of {folder.metrics.name} has no step"
    age = time.time() - folder.metrics.stat().st_mtime
    figures = ", ".join(f"{name} {last[name]:.4g}" for name in SHOWN if is_number(last.get(name)))
    state = "" if not ended else "stopped, " if ended.get("stopped_early") else "finished, "
    return f"{state}step {last['step']:g}, {clock(age)} ago, {figures}".rstrip(", ")


def _last_step(timeline: Path) -> str:
    """The last step that a rank's timeline has, and the stage with which it ended."""
    line = last_line(timeline)
    if line is None:
        return "no step yet"
    stage = line["spans"][-1][0] if line["spans"] else "nothing"
    return f"step {line['step']} ended {clock(time.time() - timeline.stat().st_mtime)} ago, with {stage}"


def _asked_servers(folder: RunFolder, ask: Ask) -> list[tuple[str, str, str]]:
    """Rows of the servers that rank 0 sampled from in its last step, by address."""
    line = last_line(folder.timeline / "rank_0.jsonl") or {"loads": {}}
    steps = json_object(folder.summary).get("steps")
    if is_number(steps) and steps >= line.get("step", math.inf):
        ask = "none"  # the run has ended its servers
    rows = []
    for address, loads in line["loads"].items():
        running = f"{loads[-1][1]} completions under way at the end of step {line['step']}" if loads else "idle"
        health = _health(address, ask)
        rows.append((f"server {address}", f"{running}, {health}" if health else running, ""))
    return rows


def _tail(log: Path) -> str:
    """The last line that is not blank."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:LINE] if lines else ""


def _health(address: str, ask: Ask) -> str:
    """Tells if the server at `host:port` answers. Returns "" if `ask` leaves it out.

    It is asked without its key, which a forged address would learn. A server of megarl refuses that, and so answers.
    """
    if ask == "none":
        return ""
    try:
        with contextlib.closing(http.client.HTTPConnection(address.strip(), timeout=HEALTH_S)) as connection:
            if ask == "loopback" and not _is_loopback(connection.host):
                return ""
            connection.request("GET", "/health")
            status = connection.getresponse().status
            return f"{address} answers" if status in (200, 401) else f"{address} answers with {status}"
    except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:  # of malformed addresses too
        return f"{address} does not answer: {error}"


def _is_loopback(host: str) -> bool:
    """True for localhost and numeric loopback addresses; no other name is resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    cli.exit_with(show, USAGE)
