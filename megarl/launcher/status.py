"""Shows a run under any launcher: its job, its last step, each rank and each server. Reads files only.

python -m megarl.launcher.status [RUN]
"""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl import cli
from megarl.knobs import UserError
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.parallel.watchdog import Monitor

RUNS = Path("runs")
HEALTH_S = 3.0
COMMAND_S = 20.0
LINE = 90  # characters of a log's last line
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
    logs = (folder.logs / "latest").resolve() if (folder.logs / "latest").exists() else folder.logs
    job = logs / "job" if (logs / "job").is_dir() else logs
    table = Table(title=f"{folder.path} ({logs.name})", title_justify="left")
    for column in ("what", "state", "last line of its log"):
        table.add_column(column, overflow="fold")
    if folder.path.name.startswith("job_"):
        table.add_row(folder.path.name.replace("_", " "), _queued(folder.path.name.removeprefix("job_")), "")
    table.add_row("run", _step(folder), "")
    watch = job / "watch" if (job / "watch").is_dir() else logs / "watch"
    ranks = sorted({_number(path) for path in (*logs.glob("rank_*.log"), *watch.glob("rank_*.watch"))})
    monitor = Monitor(watch, len(ranks), timeout_s=0)
    for rank in ranks:
        log = logs / f"rank_{rank}.log"  # rank 0 of a local run wrote to its terminal
        table.add_row(f"rank {rank}", monitor.describe(rank), _tail(log) if log.exists() else "")
    for log in sorted([*logs.glob("server_*.log"), *logs.glob("sglang-*.log")], key=_number):
        published = job / f"server_{_number(log)}"
        state = _health(published.read_text()) if published.is_file() and log.name.startswith("server") else ""
        table.add_row(log.stem.replace("_", " "), state, _tail(log))
    return table


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
    rows = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    ended = json.loads(folder.summary.read_text()) if folder.summary.is_file() else None
    if not rows:
        return "no step yet"
    age = time.time() - folder.metrics.stat().st_mtime
    figures = ", ".join(f"{name} {rows[-1][name]:.4g}" for name in SHOWN if name in rows[-1])
    state = "" if ended is None else "stopped, " if ended["stopped_early"] else "finished, "
    return f"{state}step {rows[-1]['step']:g}, {age:.0f} s ago, {figures}".rstrip(", ")


def _tail(log: Path) -> str:
    """The last line that is not blank."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:LINE] if lines else ""


def _health(address: str) -> str:
    """Asks the server at `host:port` for its health, which needs no key."""
    connection = http.client.HTTPConnection(address.strip(), timeout=HEALTH_S)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
        return f"{address} answers" if status == 200 else f"{address} answers with {status}"
    except (OSError, http.client.HTTPException) as error:
        return f"{address} does not answer: {error}"
    finally:
        connection.close()


if __name__ == "__main__":
    cli.exit_with(show)
