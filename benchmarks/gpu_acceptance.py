"""Proves megarl on this machine's GPUs in at most 20 minutes, and writes one report with every figure.

    python benchmarks/gpu_acceptance.py [--gpus 1|2|8] [--model FOLDER] [--out FOLDER]
    python benchmarks/gpu_acceptance.py --dry-run --gpus 8        prints the steps; needs no GPU
    python benchmarks/gpu_acceptance.py --device cpu              the steps that a CPU can take, at small sizes
    python benchmarks/gpu_acceptance.py --only transport "grpo c"     steps whose names begin so

Each step has a log and a deadline of its own, and a step that fails does not stop the next. On GPUs the figures also go
into the GPU table of docs/numbers.md. Exit code 1 if a step failed, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

from acceptance.plan import BUDGET_S, GPU_COUNTS, OPTIONAL_PARTS, ROOT, Machine, Step, plan


def gpus_here() -> int:
    """GPUs that torch finds on this machine."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def packages_here() -> frozenset[str]:
    """Names of `OPTIONAL_PARTS` that this machine has: commands, or packages of Python."""
    return frozenset(name for name in OPTIONAL_PARTS if shutil.which(name) or importlib.util.find_spec(name))


def show(steps: list[Step]) -> None:
    """Prints the plan."""
    for number, step in enumerate(steps, 1):
        print(f"{number:2d}. {step.name} (at most {step.deadline_s:g} s): {step.proves}")
        print(f"    {'skipped: ' + step.skip if step.skip else step.shown()}")
    print(f"{len(steps)} steps, at most {BUDGET_S / 60:g} minutes in all")


def chosen(steps: list[Step], beginnings: list[str]) -> list[Step]:
    """Steps whose names begin with one of `beginnings`."""
    return [step for step in steps if step.name.startswith(tuple(beginnings))]


def largest_supported(count: int) -> int:
    """The most of this machine's GPUs that a plan is written for."""
    return max((gpus for gpus in GPU_COUNTS if gpus <= count), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the steps and end")
    parser.add_argument("--gpus", type=int, choices=GPU_COUNTS, help="default: as many as there are")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="steps whose names begin so; leaves the table as it is"
    )
    parser.add_argument("--model", default="", help="HF checkpoint of the GRPO runs; default: a random model")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-acceptance", help="folder of the reports")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "numbers.md", help="page whose table is filled")
    args = parser.parse_args()
    if args.dry_run:
        # The machine may be another one: every optional part counts as present.
        gpus = 0 if args.device == "cpu" else args.gpus or largest_supported(gpus_here()) or 1
        show(chosen(plan(Machine(gpus, OPTIONAL_PARTS), args.model), args.only))
        return 0
    available = gpus_here() if args.device == "cuda" else 0
    if args.device == "cuda" and available < (args.gpus or 1):
        needed = f"{args.gpus} GPUs" if args.gpus else "a GPU"
        print(
            f"gpu_acceptance: torch finds {available} GPUs, and {needed} must be here; see --dry-run", file=sys.stderr
        )
        return 2
    if args.model and not (Path(args.model) / "config.json").is_file():
        print(f"gpu_acceptance: --model {args.model} has no config.json; give a checkpoint's folder", file=sys.stderr)
        return 2
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif args.gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(args.gpus)))
    machine = Machine(0 if args.device == "cpu" else args.gpus or largest_supported(available), packages_here())
    names = [step.name for step in plan(machine)]
    if unknown := [name for name in args.only if not any(step.startswith(name) for step in names)]:
        print(f"gpu_acceptance: --only {unknown[0]!r} begins no step; there are {', '.join(names)}", file=sys.stderr)
        return 2
    return accept(machine, args)


def accept(machine: Machine, args: argparse.Namespace) -> int:
    """Runs the plan, writes the report, and returns the exit code."""
    from acceptance import report, runner, table

    folder = args.out / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True)
    began = time.monotonic()
    model = str(Path(args.model).resolve()) if args.model else ""
    results = runner.run_all(chosen(plan(machine, model), args.only), folder)
    facts = report.collect(machine, results, time.monotonic() - began)
    json_file, markdown, page = report.write(facts, folder)
    print(f"report    {page}\n          {markdown}")
    if machine.gpus and args.page.is_file() and args.only == [""]:
        table.write_table(json_file, args.page)
        print(f"table     {args.page}")
    failed = report.failed(facts)
    print(f"FAILED    {', '.join(failed)}" if failed else "no step failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
