"""Every method on the bundled task for a short time, over seeds: does its own metric improve?

    OMP_NUM_THREADS=1 python benchmarks/every_method.py [--methods grpo dpo ...] [--seeds 1 2 3]

RL methods run half the steps of their recipe, all on one server, which is brought the start weights before each run;
their metric is held-out accuracy, sampled. The methods on preferences run theirs whole: margin and share in order of
held-out pairs (KTO: of judged completions). SFT's is the held-out loss. Each run goes through the trainer's own loop.
About 15 minutes a seed on two cores for all. Prints a table and draws docs/every_method.png.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl import cli
from megarl.algorithms import ALGORITHMS, RLConfig
from megarl.observe.logger import read_metrics
from megarl.observe.metrics import ACCURACY, MARGIN
from megarl.observe.run_folder import RunFolder, new_run
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.client.connections import ADDRESSES_VARIABLE, KEY_VARIABLE
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.train import make_folder, train
from megarl.trainer.inputs import read_inputs

ROOT = Path(__file__).parents[1]
LOSS = "eval/loss"
Curve = list[tuple[int, float]]  # step, value


@dataclass(frozen=True)
class Case:
    """One method: its recipe, what is changed, and the metric that must improve."""

    recipe: str
    metric: str
    overrides: tuple[str, ...] = ()
    falls: bool = False  # the metric is better where it is lower


SHORT_RL = ("total_train_steps=40", "evaluator.every_steps=20")
# Losses without a clip, or with one that keeps every token's gradient, fall over at the recipe's 5e-4.
RATES = {"rloo": 2e-4, "cispo": 2e-4, "reinforce": 2e-4, "remax": 2e-4}


def cases() -> dict[str, Case]:
    """Every method by name, RL first."""
    recipes = {"ppo": "gsm8k_ppo", "gdpo": "gsm8k_gdpo", "opd": "opd"}
    found = {}
    for name, (kind, _) in ALGORITHMS.items():
        if issubclass(kind, RLConfig):
            rate = (f"actor.optimizer.lr={RATES[name]}",) if name in RATES else ()
            recipe = recipes.get(name, "gsm8k_grpo")
            found[name] = Case(recipe, ACCURACY, (f"algorithm={name}", *SHORT_RL, *rate))
    for name, (kind, _) in ALGORITHMS.items():
        if not issubclass(kind, RLConfig):
            found[name] = Case({"reward_model": "reward"}.get(name, name), MARGIN, ("evaluator.every_steps=25",))
    sft = ("total_train_steps=60", "evaluator.every_steps=10")
    return {**found, "sft": Case("gsm8k_sft", LOSS, sft, falls=True)}


@contextlib.contextmanager
def one_server(folder: Path) -> Iterator[None]:
    """A server of the bundled model, which runs find as one that somebody else started."""
    config = cli.load(["+experiment=gsm8k_grpo"])
    servers = SGLangServers(config.server, Path(config.actor.path), folder, WEIGHT_LOADER, config.sglang)
    with servers:
        servers.start()
        servers.wait_ready()
        os.environ[ADDRESSES_VARIABLE], os.environ[KEY_VARIABLE] = servers.addresses[0], servers.api_key
        yield


def run(name: str, case: Case, seed: int, root: Path) -> dict[str, Curve]:
    """Curves of the case's metric and, of pairs, of the share in order."""
    config = cli.load(
        [f"+experiment={case.recipe}", *case.overrides, f"seed={seed}", f"experiment_name={name}_{seed}",
         f"run_root={root}", "saver.every_steps=0", "saver.export_hf=false"]
    )  # fmt: skip
    folder = make_folder(config)
    with (root / f"{name}_{seed}.log").open("w") as log, contextlib.redirect_stdout(log):
        train(config, folder, read_inputs(config, 0), time.monotonic())
    return {key: curve_of(folder, key) for key in {case.metric, ACCURACY} if curve_of(folder, key)}


def curve_of(folder: RunFolder, key: str) -> Curve:
    return [(int(row["step"]), row[key]) for row in read_metrics(folder.metrics) if key in row]


def text(value: float, metric: str) -> str:
    return f"{value:.1%}" if metric == ACCURACY else f"{value:.3f}"


def show(results: Mapping[str, Mapping[int, Mapping[str, Curve]]]) -> None:
    """A line a method: before and after for every seed, and how many seeds improved."""
    lines = [("method", "metric", "before and after, by seed", "improved")]
    for name, runs in results.items():
        for metric in dict.fromkeys((cases()[name].metric, ACCURACY)):
            curves = [run[metric] for run in runs.values() if metric in run]
            if not curves:
                continue
            ends = [(curve[0][1], curve[-1][1]) for curve in curves]
            better = sum((after < before) if cases()[name].falls else (after > before) for before, after in ends)
            spans = ", ".join(f"{text(a, metric)} {text(b, metric)}" for a, b in ends)
            lines.append((name, metric, spans, f"{better} of {len(ends)}"))
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def draw(results: Mapping[str, Mapping[int, Mapping[str, Curve]]], path: Path) -> None:
    """A small panel a method, a line a seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 5
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(12.5, 2.2 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in panels:
        axes.set_visible(False)
    for axes, (name, runs) in zip(figure.axes, results.items(), strict=False):
        metric = cases()[name].metric
        factor = 100 if metric == ACCURACY else 1
        axes.set_visible(True)
        for values in runs.values():
            axes.plot([s for s, _ in values[metric]], [factor * v for _, v in values[metric]], marker="o", markersize=3)
        kind = {ACCURACY: "accuracy (%)", MARGIN: "margin", LOSS: "loss"}[metric]
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes.set_title(kind, loc="right", fontsize=7, color="#52606d")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    figure.supxlabel("training steps; all on held-out data, one line a seed", fontsize=9)
    figure.savefig(path)


def measure(names: Sequence[str], seeds: Sequence[int], root: Path) -> dict[str, dict[int, dict[str, Curve]]]:
    results: dict[str, dict[int, dict[str, Curve]]] = {}
    with contextlib.ExitStack() as stack:
        if any(cases()[name].metric == ACCURACY for name in names):
            stack.enter_context(one_server(root))
        for seed, name in itertools.product(seeds, names):
            began = time.monotonic()
            results.setdefault(name, {})[seed] = run(name, cases()[name], seed, root)
            (root / "results.json").write_text(json.dumps(results))
            ends, took = results[name][seed][cases()[name].metric], time.monotonic() - began
            print(f"{name} seed {seed}: {ends[0][1]:.3f} {ends[-1][1]:.3f}, {took:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(cases()), choices=list(cases()), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--run-root", default="runs", help="where a folder for runs, logs and results.json is made")
    args = parser.parse_args()
    root = new_run(args.run_root, "every_method").path.resolve()
    results = measure(args.methods, args.seeds, root)
    show(results)
    draw(results, ROOT / "docs" / "every_method.png")


if __name__ == "__main__":
    main()
