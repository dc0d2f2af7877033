"""Starts the process that runs cases on the device, and reads their outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Case = tuple[str, dict[str, Any], dict[str, int]]  # function, arguments, layout


def run_on_device(device: Path, cases: dict[str, Case], folder: Path, *path: Path) -> dict[str, dict[str, Any]]:
    """Runs cases in one process, which imports from `path`."""
    command = [sys.executable, str(HERE / "worker.py"), str(device), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # Triton would compile for a GPU
    with (folder / "log").open("w") as log:
        out = subprocess.run(
            command,
            input=json.dumps(list(cases.values())),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=2400,
            env=environment,
        )
    lines = [json.loads(line) for line in out.stdout.splitlines()]
    assert len(lines) == len(cases), (folder / "log").read_text()[-3000:]
    return dict(zip(cases, lines, strict=True))


def result(outcomes: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The result of a case, which must have ended well."""
    assert "error" not in outcomes[name], outcomes[name]["error"]
    return outcomes[name]["result"]
