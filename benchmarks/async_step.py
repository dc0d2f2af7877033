"""The step of a run whose rollouts overlap with training, against the longer of rollout and training alone.

`python benchmarks/async_step.py`: the bundled recipe, once in turn and once with rollouts one version ahead, trainer
and server on a core each. A step in turn takes rollout + train; overlapped, max(rollout, train) is the floor.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import machine

from megarl.observe.logger import read_metrics

STEPS, WARM = 40, 8
ARGUMENTS = [
    "+experiment=gsm8k_grpo", f"total_train_steps={STEPS}", "evaluator.every_steps=0", "evaluator.at_start=false",
    "saver.export_hf=false", "actor.max_tokens_per_mb=1024",
]  # fmt: skip
STAGES = ("logprobs", "advantages", "update")


def stages_of(root: Path, ahead: int) -> dict[str, float]:
    """Median seconds of each stage of a run, by name, and of all of a step."""
    command = [sys.executable, "-m", "megarl.train", *ARGUMENTS, f"run_root={root}"]
    command += [f"rollout.max_head_offpolicyness={ahead}", f"experiment_name=ahead{ahead}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1200)
    rows = read_metrics(root / f"ahead{ahead}" / "latest" / "metrics.jsonl")[WARM:]
    names = ("rollout", *STAGES, "weights")
    found = {name: statistics.median(row[f"time_s/{name}"] for row in rows) for name in names}
    found["step"] = statistics.median(sum(row[f"time_s/{name}"] for name in names) for row in rows)
    return found


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        in_turn, ahead = (stages_of(Path(folder), number) for number in (0, 1))
    rollout, train = in_turn["rollout"], sum(in_turn[name] for name in STAGES)
    floor = max(rollout, train) + in_turn["weights"]
    print(f"{machine('cpu')}; cores {cores}; medians of {STEPS - WARM} steps")
    print(f"  alone: rollout {rollout:.3f} s, train {train:.3f} s, weights {in_turn['weights']:.3f} s")
    print(f"  in turn {in_turn['step']:.3f} s a step, overlapped {ahead['step']:.3f} s a step")
    print(f"  overlapped / (max(rollout, train) + weights): {ahead['step'] / floor:.2f} (goal 1.15)")


if __name__ == "__main__":
    main()
