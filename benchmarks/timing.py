"""Side-by-side timing for the scripts in this folder: warm allocators, medians, all sides in turn within one run.

With `--json FILE` a script also appends each figure to FILE, as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

# Without these, glibc hands large blocks back to the system after each use, and every side mostly times page faults.
WARM_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 35),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 37),
    "MALLOC_ARENA_MAX": "1",
}


def with_warm_allocator() -> None:
    """Starts the script again with an allocator that keeps its memory. Call first."""
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") != WARM_ALLOCATOR["MALLOC_TRIM_THRESHOLD_"]:
        os.environ.update(WARM_ALLOCATOR)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def side_by_side(
    sides: Mapping[str, Callable[[], object]],
    *,
    device: str = "cpu",
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a call of each side. Sides take turns, so that a busy moment of the machine meets all.

    A short call is repeated within its turn, up to 5 ms. `clock=time.process_time` counts processor time, for a machine
    that others use as well.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    repeats = dict.fromkeys(sides, 1)
    for number in range(rounds + 2):
        for name, run in sides.items():
            synchronize(device)
            start = clock()
            for _ in range(repeats[name]):
                run()
            synchronize(device)
            elapsed = clock() - start
            if number >= 2:  # the first two rounds warm caches, allocators and compilers
                times[name].append(elapsed / repeats[name])
            elif number == 1:
                repeats[name] = max(1, round(0.005 / elapsed))
    return {name: statistics.median(t) for name, t in times.items()}


def host_seconds(run: Callable[[], object], calls: int = 50) -> float:
    """Seconds that the host takes to issue a call to the GPU, without waiting for its end."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    with open("/proc/cpuinfo") as info:
        model = next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "unknown CPU")
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


_figures: Path | None = None  # set by `parse`


def parse(parser: argparse.ArgumentParser, *, each_device: bool = False) -> argparse.Namespace:
    """Adds the options that the scripts share, and parses. `each_device` adds `--device`, by default all there are."""
    global _figures
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every figure to FILE, one line of JSON each")
    if each_device:
        parser.add_argument("--device", nargs="+", choices=("cpu", "cuda"), default=devices(), help="default: all")
    args = parser.parse_args()
    _figures = args.json
    return args


def record(figure: str, value: float, unit: str, **labels: str | int) -> None:
    """Appends a figure to the file of `--json`. `labels` tell figures of one name apart."""
    if _figures is not None:
        with _figures.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"figure": figure, "value": value, "unit": unit, **labels}) + "\n")
