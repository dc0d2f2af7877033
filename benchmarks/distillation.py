"""A student learns from a larger teacher: on its own samples, and on the teacher's, at equal trained tokens.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py [--ways "on-policy" "SFT"] [--seeds 1 2] [--steps 40]

The bundled student and teacher. Every way starts from the same checkpoint and sees as many sequences, in as many
optimizer steps, with one optimizer and schedule:

    on-policy      algorithm=opd: the student samples, the whole distribution of the teacher counts
    mixed          the same with top_k, and the teacher's server answers half of the prompts (GKD's lambda 0.5)
    off-policy     method=sft algorithm=opd: the teacher's samples, and its whole distribution of their tokens
    SFT            method=sft: the teacher's samples alone

Checkpoints of all are measured by one evaluator on one server. About 3 minutes a run on two cores. What `--run-root`
already holds is not done again. Prints a table and draws docs/distillation.png.
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

from grpo_accuracy import error, measure, measured

from megarl import cli
from megarl.export import ExportConfig, export
from megarl.observe.logger import read_metrics

ROOT = Path(__file__).parents[1]
TEACHER = cli.ASSETS / "tiny_teacher"
WAYS = {"on-policy": "#1769aa", "mixed": "#6b46c1", "off-policy": "#2f855a", "SFT": "#c05621"}
PROMPTS, SAMPLES, MINIBATCHES = 32, 4, 2  # of a step of the recipe `opd`
Curve = dict[int, float]  # accuracy in percent, by trained tokens


def overrides(way: str, steps: int, samples: Path) -> list[str]:
    """The recipe and what is changed. A supervised step is one optimizer step, so there are twice as many."""
    if way == "on-policy":
        return ["+experiment=opd", f"total_train_steps={steps}"]
    if way == "mixed":
        teacher = ["teacher.source=server", "algorithm.divergence=top_k", "algorithm.lmbda=0.5"]
        return ["+experiment=opd", f"total_train_steps={steps}", *teacher]
    data = [f"train_dataset.path={samples}", "train_dataset.name=''", "train_dataset.type=samples"]
    rows = [f"train_dataset.batch_size={PROMPTS * SAMPLES // MINIBATCHES}"]
    plan = [f"total_train_steps={MINIBATCHES * steps}", f"actor.optimizer.warmup_steps={2 * MINIBATCHES}"]
    if way == "off-policy":
        return ["+experiment=opd", "method=sft", *data, *rows, *plan]
    adam = [f"actor.optimizer.{knob}" for knob in ("lr=1.0e-3", "lr_decay_style=linear", "adam_beta2=0.99")]
    return ["+experiment=gsm8k_sft", "actor.init=checkpoint", *adam, *data, *rows, *plan]


def run_logged(command: Sequence[str], log: Path) -> None:
    with log.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip


def teacher_samples(seed: int, steps: int, root: Path) -> Path:
    """The teacher's answers to training prompts, as an evaluation keeps them."""
    name = f"teacher_{seed}"
    file = root / f"{name}_evaluate" / "latest" / "evaluations" / "step-000000.jsonl"
    if not file.exists():
        rows = f"valid_dataset.split='train[:{PROMPTS * steps}]'"
        command = ["megarl.evaluate", "+experiment=opd", f"actor.path={TEACHER}", rows, f"seed={seed}"]
        settings = [f"evaluator.n_samples={SAMPLES}", f"experiment_name={name}", f"run_root={root}"]
        run_logged([*command, *settings], root / f"{name}.log")
    return file


def trained(way: str, seed: int, steps: int, root: Path) -> tuple[list[Path], list[int]]:
    """The checkpoints of a run, and the tokens that it had trained on by then."""
    name, factor = f"{way}_{seed}", MINIBATCHES if way in ("off-policy", "SFT") else 1
    run = root / name / "latest"
    at = [factor * step for step in measured(steps)]
    if not (run / f"hf_{at[-1]}").exists():
        samples = teacher_samples(seed, steps, root) if factor > 1 else Path()
        keep = [f"saver.every_steps={at[0]}", f"saver.keep={len(at)}", "saver.export_hf=false"]
        quiet = ["evaluator.every_steps=0", "evaluator.at_start=false", "evaluator.at_end=false"]
        place = [f"seed={seed}", f"experiment_name={name}", f"run_root={root}"]
        changed = overrides(way, steps, samples)
        run_logged(["megarl.train", *changed, *keep, *quiet, *place], root / f"{name}.log")
        for step in at:
            export(ExportConfig(str(run / "checkpoints" / f"step_{step:06d}"), str(run / f"hf_{step}")))
        print(f"{name} is trained", flush=True)
    rows = {int(row["step"]): row["train/tokens"] for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0}
    assert len(rows) == at[-1], f"{run}: a line of metrics for each step is needed"
    return [run / f"hf_{step}" for step in at], [int(sum(rows[n] for n in range(1, step + 1))) for step in at]


def show(results: Mapping[str, Mapping[int, Curve]]) -> None:
    """A line a way: accuracy at the checkpoints, means over seeds with their standard error."""
    lines = [("way", "seeds", "trained tokens", "accuracy at the start and after each quarter", "at the end")]
    for way, runs in results.items():
        points = list(zip(*(sorted(curve.items()) for curve in runs.values()), strict=True))
        means = [statistics.mean(value for _, value in point) for point in points]
        ends = [value for _, value in points[-1]]
        end = f"{means[-1]:.1f}% ± {error(ends):.1f}% ({', '.join(f'{value:.1f}%' for value in ends)})"
        tokens = f"{statistics.mean(count for count, _ in points[-1]):,.0f}"
        lines.append((way, str(len(runs)), tokens, ", ".join(f"{mean:.1f}%" for mean in means), end))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def draw(results: Mapping[str, Mapping[int, Curve]], teacher: float, path: Path) -> None:
    """Held-out accuracy against trained tokens: each seed thin, their mean bold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for way, runs in results.items():
        curves = [sorted(curve.items()) for curve in runs.values()]
        for curve in curves:
            axes.plot([n / 1000 for n, _ in curve], [value for _, value in curve], color=WAYS[way], alpha=0.3)
        points = list(zip(*curves, strict=True))
        at = [statistics.mean(n for n, _ in point) / 1000 for point in points]
        mean = [statistics.mean(value for _, value in point) for point in points]
        axes.plot(at, mean, color=WAYS[way], linewidth=2.4, marker="o", markersize=5, label=f"{way}, mean of seeds")
    axes.axhline(teacher, color="#52606d", linewidth=1, linestyle="--", label="the teacher")
    axes.set_title("Held-out accuracy", loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel("solved (%)")
    axes.set_xlabel("trained tokens, prompts among them (thousands)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=40, help="of the on-policy run, a multiple of 4")
    parser.add_argument("--eval-samples", type=int, default=8, help="completions a held-out problem")
    parser.add_argument("--run-root", default="runs/distillation", help="folder of the runs and results.json")
    args = parser.parse_args()
    root = Path(args.run_root).resolve()
    root.mkdir(parents=True, exist_ok=True)
    runs = {(way, seed): trained(way, seed, args.steps, root) for seed in args.seeds for way in args.ways}
    start = cli.ASSETS / "tiny"
    folders = [start, *(folder for found, _ in runs.values() for folder in found)]
    measures = measure([TEACHER], args.eval_samples, root) + measure(folders, args.eval_samples, root)
    accuracy = {folder: 100 * value for folder, value in zip([TEACHER, *folders], measures, strict=True)}
    results: dict[str, dict[int, Curve]] = {way: {} for way in args.ways}
    for (way, seed), (found, tokens) in runs.items():
        results[way][seed] = {0: accuracy[start], **{n: accuracy[f] for n, f in zip(tokens, found, strict=True)}}
    (root / "results.json").write_text(json.dumps({"teacher": accuracy[TEACHER], **results}))
    print(f"the teacher: {accuracy[TEACHER]:.1f}%")
    show(results)
    draw(results, accuracy[TEACHER], ROOT / "docs" / "distillation.png")


if __name__ == "__main__":
    main()
