"""Ten deterministic GRPO steps, twice: whether the second run repeats the first's bits, and how far the sides part.

    python benchmarks/acceptance/deterministic_run.py --gpus 8 --layout apart|colocated [--model FOLDER] [--steps 10]

Model and layout are those of `grpo_run.py`. Exit code 1 unless every figure of every step is equal in both runs, apart
from times and from what is counted by the clock. The largest log-prob difference of servers and trainer is a figure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # timing.py and this package

from timing import parse, record

from acceptance.grpo_run import write_model
from acceptance.plan import benchmarks_on_path, overrides
from megarl.observe import metrics
from megarl.observe.logger import read_metrics

TRAIN_DEADLINE_S = 220  # of one run
# Figures of what happened until the step was written: the next step's completions, some of them, may have ended too.
BY_THE_CLOCK = (metrics.TIME, "time", "rollout/truncated")


def command(args: argparse.Namespace, model: Path, root: Path) -> list[str]:
    """One run. The trainer waits for its rollouts, so that no sample's version depends on the clock."""
    own = [
        f"actor.path={model}", f"run_root={root}", "experiment_name=deterministic", "deterministic=true",
        "rollout.max_head_offpolicyness=0", f"actor.optimizer.lr={3e-5 if args.model else 3e-4}",
    ]  # fmt: skip
    return [sys.executable, "-m", "megarl.train", *overrides(args.gpus, args.layout, args.steps), *own]


def different(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> list[str]:
    """Figures that two runs do not share, as `step NUMBER: NAME`."""
    if len(first) != len(second):
        return [f"{len(first)} steps, then {len(second)}"]
    found = []
    for number, (one, other) in enumerate(zip(first, second, strict=True), 1):
        names = sorted(one.keys() | other.keys())
        compared = [name for name in names if not name.startswith(BY_THE_CLOCK) and not name.endswith("_per_s")]
        found += [f"step {number}: {name}" for name in compared if one.get(name) != other.get(name)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="0: on the CPU")
    parser.add_argument("--layout", choices=("apart", "colocated"), required=True)
    parser.add_argument("--model", type=Path, help="folder of a HF checkpoint; default: a random model")
    parser.add_argument("--steps", type=int, default=10)
    args = parse(parser)
    runs = []
    with tempfile.TemporaryDirectory(prefix="megarl-deterministic-") as scratch:
        if not args.model:
            write_model(Path(scratch) / "model", on_gpu=args.gpus > 0)
        for name in ("first", "second"):
            root = Path(scratch) / name
            train = command(args, args.model or Path(scratch) / "model", root)
            try:
                subprocess.run(train, env=benchmarks_on_path(), timeout=TRAIN_DEADLINE_S, check=True)
            except subprocess.SubprocessError as error:  # its command line would hide the cause above
                ended = getattr(error, "returncode", f"no code within {TRAIN_DEADLINE_S} s")
                print(f"megarl.train ended with {ended}")
                return 1
            runs.append(read_metrics(root / "deterministic" / "latest" / "metrics.jsonl"))
    labels = {"layout": args.layout, "gpus": args.gpus}
    parted = different(*runs)
    largest = max(row["train/logprob_diff_max"] for rows in runs for row in rows if "train/logprob_diff_max" in row)
    record("largest log-prob difference of a deterministic run", largest, "nats", **labels)
    record("figures that two deterministic runs do not share", len(parted), "figures", **labels)
    print("\n".join(parted[:20]) or "both runs have the same bits in every figure")
    return int(bool(parted))


if __name__ == "__main__":
    sys.exit(main())
