"""Bytes that a step of a GPU recipe moves, against the least possible for its layout. No GPU is used.

    python benchmarks/step_bytes.py [--recipes NAME ...]

Bytes are received ones: of a trainer's GPU by dimension of the layout, of a server's GPU in a weight sync. Formulas,
lower bounds and what hides beside compute are those of `megarl/preflight/communication.py`; a server's GPU must receive
the weights that it holds, once. Seconds are preflight's, not measured: "moved" is all of it, one after another, and
"exposed" what compute does not hide.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from timing import parse, record

from megarl import cli
from megarl.config import Config
from megarl.families import read_config
from megarl.parallel.config import ParallelConfig
from megarl.preflight import report, sync_report
from megarl.preflight.communication import Moved
from megarl.preflight.planned_sync import planned_sync
from megarl.preflight.roofline import estimate_step

RECIPES = (
    "grpo_1_5b", "grpo_7b", "grpo_7b_colocated", "grpo_70b", "grpo_moe_235b", "dapo_32b", "sft_8b", "dpo_8b", "opd_8b",
)  # fmt: skip


def rows(config: Config) -> Iterator[tuple[str, Moved]]:
    """Yields each dimension of a recipe, and its weight sync, with their traffic of a step."""
    model = read_config(str(report.folder_of(config.actor.path)))
    if config.method != "rl":
        yield from estimate_step(config, model).traffic.parts().items()
        return
    summary = sync_report.summarise(planned_sync(config, model))
    sync_s = summary.seconds(config.cluster.network_gb_s * 1e9)
    step = estimate_step(config, model, sync_s)
    yield from step.traffic.parts().items()
    received, needed = float(summary.received.nbytes.mean()), float(summary.needed.mean())
    yield "sync", Moved(received, needed, sync_s, sync_s - step.hidden_s)


def layout(parallel: ParallelConfig) -> str:
    """Sizes above 1 of a recipe's layout."""
    sizes = {short: getattr(parallel, f"{short}_size") or 1 for short in ("tp", "pp", "vpp", "cp", "dp", "ep")}
    return " ".join(f"{short}{size}" for short, size in sizes.items() if size > 1)


def lines(name: str) -> Iterator[tuple[str, float, str]]:
    """Yields traffic, ratio and the table's line of each row of a recipe."""
    config = cli.load([f"+experiment={name}"])
    for dimension, moved in rows(config):
        ratio, (nbytes, least) = moved.nbytes / moved.least, map(int, (moved.nbytes, moved.least))
        cells = [f"`{name}`", layout(config.parallel), dimension, sync_report.size(nbytes), sync_report.size(least)]
        cells += [f"{ratio:.2f}", sync_report.duration(moved.seconds), sync_report.duration(moved.exposed)]
        yield dimension, ratio, f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    args = parse(parser)
    print("| recipe | layout | traffic | a GPU receives | the least | ratio | moved | exposed |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.recipes:
        for dimension, ratio, line in lines(name):
            print(line, flush=True)
            record("bytes over the least", ratio, "", run=f"{name} {dimension}")


if __name__ == "__main__":
    main()
