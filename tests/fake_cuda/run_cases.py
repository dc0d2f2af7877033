"""The process that runs cases on the device, and the outcomes that it tells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Case = tuple[str, dict[str, Any], dict[str, int]]  # function, arguments, layout


class DeviceProcess:
    """A process with the device, which imports from `path`. It runs cases one after another."""

    def __init__(self, device: Path, folder: Path, *path: Path) -> None:
        command = [sys.executable, str(HERE / "worker.py"), str(device), str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
        environment["TORCHDYNAMO_DISABLE"] = "1"  # Triton would compile for a GPU
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def run(self, case: Case) -> dict[str, Any]:
        """The outcome of a case: {"result": ...} or {"error": traceback}."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its log says why
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
        try:
            line = self.process.stdout.readline()  # for no longer than the test may take
        except BaseException:
            self.process.kill()  # else the next case would read this one's line
            raise
        assert line, self.log.read_text()[-3000:]
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Outcomes(dict[str, dict[str, Any]]):
    """Outcomes by the cases' names. A case runs when it is first asked for, and so within the limit of that test."""

    def __init__(self, process: DeviceProcess, cases: dict[str, Case]) -> None:
        super().__init__()
        self.process, self.cases = process, cases

    def __missing__(self, name: str) -> dict[str, Any]:
        self[name] = self.process.run(self.cases[name])
        return self[name]


def result(outcomes: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The result of a case, which must have ended well."""
    assert "error" not in outcomes[name], outcomes[name]["error"]
    found: dict[str, Any] = outcomes[name]["result"]
    return found
