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
    assert len(rows) == 14, run.stdout
    page = (ROOT / "docs" / "numbers.md").read_text()
    assert "\n".join(rows) in page
    assert "5 launches in forward and 9 in backward" in run.stdout
    assert "93% of 8,192, 92% of 16,384, 56% of 32,768" in run.stdout
    counts = {name.strip(): [int(cell) for cell in cells] for _, name, *cells, _ in (r.split("|") for r in rows[2:])}
    assert counts["all fused"] == counts["Megatron's own GPT spec"]
    (forward, *rest), (own_forward, *own) = counts["experts: all fused"], counts["experts: Megatron's own GPT spec"]
    assert (forward, rest[0]) == (own_forward + 1, own[0])  # routers hand the kernel finite numbers
    assert rest[-1] == own[-1] == 1  # the host waits for tokens by expert
