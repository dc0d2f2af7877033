"""Simulates rollouts, training and weight syncs of the GPU recipes, event by event. No GPU is used.

    python benchmarks/pipeline.py [--recipes NAME ...] [--gpus N ...] [--picture FILE] [--samples FILE]

Five ways to run a step:

    shared      in turn on the same GPUs: all of them sample, then all of them train
    in turn     servers and trainer on GPUs of their own, one waits for the other (rollout.max_head_offpolicyness=0)
    overlapped  servers sample a batch whole while the trainer trains the one before. A server takes new weights after
                its last completion of the batch, so syncs hide in the tail of generation
    partial     megarl's max_head_offpolicyness=2: a sync interrupts generation, which goes on with the new weights
    scoring     partial, with reshard.overlap_scoring: the next batch is scored while the servers receive weights

Times of decode steps, prefills, updates and syncs are preflight's: a model, not a measurement. A server decodes its
completions together, and each ends at its own length. Lengths are log-normal with the recipe's mean
(`cluster.mean_length`), cut at the longest allowed. Their spread is --sigma. 0.99 is a 99th percentile of ten medians
(https://jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html). --samples takes the lengths of a run's
evaluation instead (RUN/evaluations/step-*.jsonl), in characters of completion, scaled to the recipe's mean.

Beyond the size of the recipe, batch, replicas and servers grow with the GPUs. Below it, `preflight tune` lays the run
out. Batches above LARGEST completions are simulated on a part of the servers, as further ones behave alike.

Failures come at Llama 3's rate: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, section
3.3.4). One of a trainer's GPUs loses the steps since the last checkpoint, and --restart-s. One of a server's GPUs loses
that server's unfinished completions, and its speed for --restart-s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pipeline_simulator import Lengths, Result, Setup, Simulation

from megarl import cli
from megarl.actor.batch.balance import SequenceCost
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.preflight import report, tune
from megarl.preflight.roofline import decode_speed, times_of, under_way_of
from megarl.preflight.sizing import memory_of
from megarl.preflight.trainer_work import TrainerWork

RECIPES = ("grpo_1_5b", "grpo_7b", "grpo_70b", "grpo_moe_235b", "dapo_32b")
SCALES = (64, 1024, 10_000)
MODES = ("shared", "in turn", "overlapped", "partial", "scoring")
STALENESS = {"shared": 0, "in turn": 0, "overlapped": 1, "partial": 2, "scoring": 2}
FAILURES = 419 / (54 * 86400 * 16384)  # of a GPU and second
HOST_LINK = 25e9  # bytes/s between GPU and host: half of PCIe 5. Assumed
LARGEST = 8192
DAYS = 30  # of the simulation of failures


# -- setups -----------------------------------------------------------------------------------------------------------


def log_normal(mean: float, longest: int, sigma: float) -> Lengths:
    """Lengths of a log-normal distribution cut at `longest`, whose mean is `mean` after the cut."""

    def cut_mean(mu: float) -> float:
        def below(x: float) -> float:
            return (1 + math.erf(x / math.sqrt(2))) / 2

        z = (math.log(longest) - mu) / sigma
        return math.exp(mu + sigma**2 / 2) * below(z - sigma) + longest * (1 - below(z))

    low, high = -5.0, math.log(longest) + 20
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return lambda rng, count: np.clip(np.rint(rng.lognormal(low, sigma, count)), 1, longest).astype(np.int64)


def sampled(file: Path, mean: float, longest: int) -> Lengths:
    """Lengths drawn from a run's samples, scaled to `mean` tokens and cut at `longest`."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    sizes = np.array([len(row["completion"]) for row in rows], dtype=float)
    if not sizes.sum():
        raise UserError(f"--samples {file} has no completions; give RUN/evaluations/step-*.jsonl")
    sizes *= mean / sizes.mean()
    return lambda rng, count: np.clip(np.rint(rng.choice(sizes, count)), 1, longest).astype(np.int64)


def setup_of(config: Config, model: Any, lengths: Lengths) -> Setup:
    """The run of a configuration, by preflight's times."""
    work, cluster, server = TrainerWork.of(config, model), config.cluster, config.server
    times, trained = times_of(config, work), work.sequences * work.mean
    prompt = cluster.mean_length * (config.train_dataset.max_length or 0)
    compute = server.tp_size * cluster.gpu_tflops * 1e12 * cluster.train_utilisation
    return Setup(
        prompts=config.train_dataset.batch_size,
        samples=config.gconfig.n_samples,
        prompt_tokens=prompt,
        lengths=lengths,
        speed=decode_speed(config, model),
        servers=server.n_servers,
        server_gpus=server.tp_size,
        slots=under_way_of(config, model, max(STALENESS.values())),
        prefill_s=SequenceCost.of(model).linear / compute,
        trainer_gpus=config.parallel.world_size(),
        train_s=times.total / trained,
        score_s=times.scored_s / trained,
        sync_s=tune.estimate(config, model).sync_s,
    )


def in_mode(setup: Setup, mode: str, swap_s: float) -> Setup:
    """Turns a run into one of MODES. Shared GPUs have as many servers and replicas as all of them hold."""
    if mode == "shared":
        gpus = setup.gpus
        servers, share = gpus // setup.server_gpus, setup.trainer_gpus / gpus
        setup = replace(setup, servers=servers, trainer_gpus=gpus, train_s=setup.train_s * share, swap_s=swap_s)
    staleness = STALENESS[mode]
    slots = min(setup.slots, math.ceil(setup.prompts * setup.samples / setup.servers * max(1, staleness)))
    drains, beside = mode not in ("partial", "scoring"), mode == "scoring"
    return replace(
        setup, staleness=staleness, slots=slots, drains=drains, shared=mode == "shared", scores_beside=beside
    )


def scaled(name: str, gpus: int) -> tuple[Config, Any, int]:
    """A recipe on about `gpus` GPUs: its configuration, model, and the GPUs that the simulated part stands for.

    Raises:
        UserError: it does not fit so few.
    """
    config = cli.load([f"+experiment={name}"])
    folder = report.folder_of(config.actor.path)
    model, own = read_config(str(folder)), tune.gpus_of(config)
    if gpus < own:
        return tune.propose(config, model, folder, gpus)[0].config, model, gpus
    times = gpus // own
    largest = max(1, LARGEST // (config.train_dataset.batch_size * config.gconfig.n_samples))
    part = min(times, largest)
    dp = config.parallel.sizes()["dp_size"]
    grown = replace(
        config,
        train_dataset=replace(config.train_dataset, batch_size=config.train_dataset.batch_size * part),
        parallel=replace(config.parallel, dp_size=dp * part),
        server=replace(config.server, n_servers=config.server.n_servers * part),
        rollout=replace(config.rollout, max_connections=config.rollout.max_connections * part),
    )
    return grown, model, times * own


# -- failures ---------------------------------------------------------------------------------------------------------


def lost_to_failures(setup: Setup, result: Result, gpus: int, saved_every: int, restart_s: float, seed: int) -> float:
    """Share of DAYS of a run on `gpus` GPUs that failures cost: work done twice, and restarts."""
    rng, times = np.random.default_rng(seed), gpus / setup.gpus
    trainers, servers = setup.trainer_gpus * times, setup.servers * times
    between = saved_every * result.step_s
    limits_servers = 0.0 if setup.shared else max(0.0, 1 - result.server_idle)  # share of a server that the run needs
    wasted = setup.slots * setup.lengths(rng, 1000).mean() / 2 * setup.speed.step(setup.slots, 0.0) / setup.slots
    now, lost, saved = 0.0, 0.0, 0.0
    while True:
        now += rng.exponential(1 / (FAILURES * gpus))
        if now > DAYS * 86400:
            return min(1.0, lost / (DAYS * 86400))
        if setup.shared or rng.random() < trainers / gpus:
            saved = now - (now - saved) % between
            lost += now - saved + restart_s
            now += restart_s
            saved = now
        else:
            lost += (restart_s + wasted) * limits_servers / servers


# -- the command ------------------------------------------------------------------------------------------------------


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each recipe, number of GPUs and mode."""
    for name, gpus in itertools.product(args.recipes, args.gpus):
        try:
            config, model, stands_for = scaled(name, gpus)
        except UserError as error:
            yield {"recipe": name, "gpus": gpus, "mode": "", "refused": str(error)}
            continue
        longest = config.gconfig.max_new_tokens
        mean = config.cluster.mean_length * longest
        lengths = sampled(args.samples, mean, longest) if args.samples else log_normal(mean, longest, args.sigma)
        setup = setup_of(config, model, lengths)
        stages = memory_of(config, model)
        swap_s = max(stage.weights + stage.optimizer for stage in stages) / HOST_LINK
        traffic = times_of(config, TrainerWork.of(config, model)).communication
        for mode in MODES:
            chosen = in_mode(setup, mode, swap_s)
            result = Simulation(chosen, args.seed).run()
            every, restart_s = config.saver.every_steps, args.restart_s
            lost = lost_to_failures(chosen, result, stands_for, every, restart_s, args.seed)
            yield {
                "recipe": name, "gpus": stands_for, "mode": mode, "step_s": result.step_s,
                "tokens_per_s": result.tokens_per_s * (1 - lost), "trainer_idle": result.trainer_idle,
                "server_idle": result.server_idle, "sync_s": result.sync_s, "exposed_sync_s": result.exposed_s,
                "moved_s": sum(moved.seconds for moved in traffic.parts().values()), "exposed_s": traffic.exposed,
                "lost": lost, "oldest": result.oldest,
            }  # fmt: skip


def picture(found: list[dict[str, Any]], path: Path) -> None:
    """Draws tokens/s a GPU by recipe and scale, a bar for each mode."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["recipe"] for row in found))
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    colors = dict(zip(MODES, ("#9aa5b1", "#c44e52", "#4c72b0", "#55a868", "#8172b3"), strict=True))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        sizes = sorted({row["gpus"] for row in found if row["recipe"] == name and row["mode"]})
        for at, mode in enumerate(MODES):
            heights = [row["tokens_per_s"] for row in found if row["recipe"] == name and row["mode"] == mode]
            axes.bar([x + (at - 2) * 0.16 for x in range(len(heights))], heights, 0.16, label=mode, color=colors[mode])
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(sizes)), [f"{count:,}" for count in sizes], fontsize=8)
        axes.set_xlabel("GPUs", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.axes[0].set_ylabel("trained tokens/s a GPU", fontsize=8)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=8, frameon=False
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megarl"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--gpus", nargs="+", type=int, default=SCALES)
    parser.add_argument("--sigma", type=float, default=0.99, help="spread of the log-normal lengths")
    parser.add_argument("--samples", type=Path, help="a run's evaluations/step-*.jsonl, whose lengths are taken")
    parser.add_argument("--restart-s", type=float, default=600.0, help="seconds to restart after a failure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="an .svg or .png file to draw")
    args = parser.parse_args()
    found = []
    print(
        "| recipe | GPUs | mode | a step | tokens/s a GPU | trainer idle | servers idle | sync, exposed | "
        "communication, exposed | lost |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows(args):
        found.append(row)
        if not row["mode"]:
            print(f"| `{row['recipe']}` | {row['gpus']:,} | does not fit | | | | | | | |", flush=True)
            continue
        print(
            f"| `{row['recipe']}` | {row['gpus']:,} | {row['mode']} | {row['step_s']:.1f} s | "
            f"{row['tokens_per_s']:,.0f} | {row['trainer_idle']:.0%} | {row['server_idle']:.0%} | "
            f"{row['sync_s']:.2f}, {row['exposed_sync_s']:.2f} s | {row['moved_s']:.1f}, {row['exposed_s']:.1f} s | "
            f"{row['lost']:.1%} |",
            flush=True,
        )
    if args.picture:
        picture(found, args.picture)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
