"""Launches of a layer, as `docs/numbers.md` has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_table_of_launches_stands_in_the_numbers() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "kernel_launches.py")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 9, run.stdout
    assert "\n".join(rows) in (ROOT / "docs" / "numbers.md").read_text()
    counts = {cells[1].strip(): cells[4].strip() for cells in (row.split("|") for row in rows)}
    assert counts["all fused"] == counts["Megatron's own GPT spec"]
