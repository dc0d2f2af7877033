"""The step of a run whose rollouts overlap with training, against the longer of rollout and training alone.

`python benchmarks/async_step.py`: the bundled recipe, in turn and with rollouts one version ahead, once each a round.
The trainer is held to one core, the server to another, and the processes that compute rewards, which are a part of
rollouts, to the server's (`--rewards train`: to the trainer's). In turn a step takes rollout + train, where train is
all that is not waiting for rollouts: log-probs, update, weight sync, logs. Overlapped, max(rollout, train) of the run
in turn is the floor.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from timing import machine

from megarl.observe.logger import read_metrics

STEPS, WARM = 40, 8
ARGUMENTS = [
    "+experiment=gsm8k_grpo", f"total_train_steps={STEPS}", "evaluator.every_steps=0", "evaluator.at_start=false",
    "evaluator.at_end=false", "saver.export_hf=false", "actor.max_tokens_per_mb=1024",
]  # fmt: skip


def hold_to_cores(trainer: int, cores: list[int], second: tuple[str, ...]) -> None:
    """All threads of processes with one of the words in their command to the second core, the others' to the first."""
    for member in [psutil.Process(trainer), *psutil.Process(trainer).children(recursive=True)]:
        there = any(word in part for word in second for part in member.cmdline())
        for thread in member.threads():
            os.sched_setaffinity(thread.id, [cores[there]])


def run(root: Path, ahead: int, number: int, cores: list[int], second: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of a step, and of those the ones that the trainer waits for rollouts: medians over the steps of a run."""
    name = f"ahead{ahead}-{number}"
    command = [sys.executable, "-m", "megarl.train", *ARGUMENTS, f"run_root={root}", f"experiment_name={name}"]
    metrics = root / name / "latest" / "metrics.jsonl"
    with subprocess.Popen(
        [*command, f"rollout.max_head_offpolicyness={ahead}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n")):
            time.sleep(0.05)
        if process.poll() is None:
            hold_to_cores(process.pid, cores, second)
        process.wait(1200)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    rows = read_metrics(metrics)[WARM:]
    steps = [later["time"] - row["time"] for row, later in itertools.pairwise(rows)]
    return statistics.median(steps), statistics.median(row["time_s/rollout"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rewards", choices=("rollout", "train"), default="rollout", help="whose core computes them")
    args = parser.parse_args()
    rounds, second = args.rounds, ("sglang", "megarl.rewards") if args.rewards == "rollout" else ("sglang",)
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = [[run(Path(folder), ahead, number, cores, second) for ahead in (0, 1)] for number in range(rounds)]
    in_turn, rollout, overlapped, waited = (
        statistics.median(one[ahead][i] for one in found) for ahead in (0, 1) for i in (0, 1)
    )
    train = in_turn - rollout
    print(
        f"{machine('cpu')}; trainer and server on a core each, rewards on that of {args.rewards}; "
        f"medians of {STEPS - WARM} steps of {rounds} runs"
    )
    print(f"  in turn    {in_turn:.3f} s a step: rollout {rollout:.3f} s, train {train:.3f} s")
    print(f"  overlapped {overlapped:.3f} s a step, {waited:.3f} s of it waiting for rollouts")
    print(f"  overlapped / max(rollout, train): {overlapped / max(rollout, train):.2f} (goal 1.15)")


if __name__ == "__main__":
    main()
