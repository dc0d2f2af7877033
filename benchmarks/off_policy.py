"""GRPO on the bundled task while servers drift from the trainer, with and without corrections: accuracy, over seeds.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/off_policy.py [--drifts hot] [--seeds 1 2] [--steps 60]

Drifts: `rounded` has servers in bfloat16 for a trainer in float32; `stale` samples with weights of up to 4 steps ago;
`hot` samples at temperature 1.5 for a policy at 1; `quantised` has servers in FP8, with a scale per row. A run refuses
`hot` (`actor.temperature` must be `gconfig.temperature`), and that rule is lifted here. Corrections are knobs of
`algorithm`; `aware` trains on the quantised servers' weights instead. A run takes about 40 s on two cores. Draws a
picture, and prints held-out accuracy and the metrics of the drift.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
DRIFTS: dict[str, list[str]] = {
    "none": [],
    "rounded": ["server.dtype=bfloat16"],
    "stale": ["rollout.max_head_offpolicyness=4"],
    "hot": ["gconfig.temperature=1.5", "actor.temperature=1.0"],
    "quantised": ["server.quantization=fp8_channel"],
}
CORRECTIONS: dict[str, tuple[str, list[str]]] = {  # colour in the picture, knobs
    "none": ("#c05621", []),
    "truncate": ("#1769aa", ["algorithm.correction=truncate"]),
    "mask": ("#2f855a", ["algorithm.correction=mask"]),
    "geometric": ("#805ad5", ["algorithm.correction=truncate", "algorithm.correction_level=geometric"]),
    "aware": ("#2f855a", ["server.quantization_aware=true"]),
}
METRICS = ("train/logprob_diff_max", "train/rollout_kl", "train/rollout_chi2", "train/rollout_ess", "rollout/staleness")
Runs = dict[str, dict[str, list[list[dict[str, float]]]]]  # by drift and correction, a list of steps a seed


def overrides(drift: str, correction: str, seed: int, steps: int) -> list[str]:
    return [
        "+experiment=gsm8k_grpo", f"experiment_name=off_policy_{drift}_{correction}_{seed}", f"seed={seed}",
        f"total_train_steps={steps}", "evaluator.n_samples=8", "saver.every_steps=0", *DRIFTS[drift],
        *CORRECTIONS[correction][1], "reshard.max_logprob_diff=0", "reshard.max_token_logprob_diff=0",
    ]  # fmt: skip


def trained(drift: str, correction: str, seed: int, steps: int, root: Path) -> list[dict[str, float]]:
    """Metrics of a run, step by step. A run that is in `root` already is read."""
    folder = root / f"off_policy_{drift}_{correction}_{seed}"
    kept = root / f"{folder.name}_{steps}.json"
    if kept.is_file():
        return json.loads(kept.read_text())  # type: ignore[no-any-return]
    from megarl.observe.logger import read_metrics

    command = [sys.executable, __file__, "--train", *overrides(drift, correction, seed, steps), f"run_root={root}"]
    with (root / f"{folder.name}.log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    rows = list(read_metrics((folder / "latest").resolve() / "metrics.jsonl"))
    kept.write_text(json.dumps(rows))
    return rows


def train(arguments: list[str]) -> None:
    """Starts a run whose sampling temperature may be another than the policy's."""
    from megarl import checks, cli
    from megarl.train import command

    checks._check_sampling = lambda config: None
    sys.argv = ["megarl.train", *arguments]
    cli.exit_with(command)


def accuracies(rows: Sequence[Mapping[str, float]]) -> list[tuple[int, float]]:
    """Step and held-out accuracy in percent."""
    from megarl.observe.metrics import ACCURACY

    return [(int(row["step"]), 100 * row[ACCURACY]) for row in rows if ACCURACY in row]


def show(runs: Runs) -> None:
    lines: list[tuple[str, ...]] = [("drift", "correction", "held-out accuracy at the end", *METRICS)]
    for drift, by_correction in runs.items():
        for correction, seeds in by_correction.items():
            ends = [accuracies(rows)[-1][1] for rows in seeds]
            means = [
                statistics.mean(row[name] for rows in seeds for row in rows[len(rows) // 2 :] if name in row)
                for name in METRICS
            ]
            end = f"{statistics.mean(ends):.1f}% ({', '.join(f'{value:.1f}%' for value in ends)})"
            lines.append((drift, correction, end, *(f"{value:.3g}" for value in means)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def draw(runs: Runs, path: Path) -> None:
    """Draws held-out accuracy over steps: a panel a drift, a line a correction, the mean of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(runs), 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (drift, by_correction) in zip(panels, runs.items(), strict=True):
        for correction, seeds in by_correction.items():
            curves = [accuracies(rows) for rows in seeds]
            color = CORRECTIONS[correction][0]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=color, alpha=0.25)
            mean = [statistics.mean(value for _, value in points) for points in zip(*curves, strict=True)]
            axes.plot([step for step, _ in curves[0]], mean, color=color, linewidth=2.2, label=correction)
        axes.set_title(drift, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    panels[0].set_ylabel("held-out problems solved (%)")
    panels[-1].legend(frameon=False, title="correction")
    figure.savefig(path)


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        return train(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drifts", nargs="+", default=["rounded", "stale", "hot"], choices=list(DRIFTS))
    parser.add_argument(
        "--corrections", nargs="+", default=["none", "truncate", "mask", "geometric"], choices=list(CORRECTIONS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--picture", default=str(ROOT / "docs" / "pictures" / "off_policy.png"))
    parser.add_argument("--run-root", default="runs/off_policy", help="folder of the runs")
    args = parser.parse_args()
    root = Path(args.run_root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    runs: Runs = {
        drift: {
            correction: [trained(drift, correction, seed, args.steps, root) for seed in args.seeds]
            for correction in args.corrections
        }
        for drift in args.drifts
    }
    show(runs)
    draw(runs, Path(args.picture))


if __name__ == "__main__":
    main()
