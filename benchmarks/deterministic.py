"""What `deterministic=true` costs, and what it gives: the largest log-prob difference of rollout and trainer.

`python benchmarks/deterministic.py`: the bundled GRPO recipe without and with it, 50 steps each, trainer and server on
a core each. Ratios are of the medians of the steps' stages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import machine

from megarl.observe.logger import read_metrics

ARGUMENTS = [
    "+experiment=gsm8k_grpo", "evaluator.every_steps=0", "evaluator.at_start=false", "saver.export_hf=false",
]  # fmt: skip
STAGES = ("rollout", "logprobs", "advantages", "update", "weights")
WARM = 5


def rows_of(root: Path, deterministic: bool, steps: int) -> list[dict[str, float]]:
    """The figures of every step of a run."""
    name = f"deterministic_{deterministic}"
    command = [sys.executable, "-m", "megarl.train", *ARGUMENTS, f"run_root={root}", f"experiment_name={name}"]
    command += [f"deterministic={deterministic}", f"total_train_steps={steps}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1200)
    rows = read_metrics(root / name / "latest" / "metrics.jsonl")
    return [row for row in rows if "train/logprob_diff_max" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        runs = {on: rows_of(Path(folder), on, steps) for on in (False, True)}
    print(machine("cpu"))
    for on, rows in runs.items():
        largest = max(row["train/logprob_diff_max"] for row in rows)
        print(f"  deterministic={on}: largest |difference| over {len(rows)} steps {largest:.3g} nats")
    times = {
        on: {name: statistics.median(row[f"time_s/{name}"] for row in rows[WARM:]) for name in STAGES}
        for on, rows in runs.items()
    }
    for name in STAGES:
        slow, fast = times[True][name], times[False][name]
        print(f"  {name}: {slow:.3f} s / {fast:.3f} s = {slow / fast:.2f}")
    whole = {on: sum(found.values()) for on, found in times.items()}
    print(f"  step: {whole[True]:.3f} s / {whole[False]:.3f} s = {whole[True] / whole[False]:.2f}")


if __name__ == "__main__":
    main()
