"""Model FLOPs utilisation (MFU) of a GRPO update: random weights of a real model, its own FLOPs over the GPUs' peak.

    python benchmarks/update_mfu.py model=qwen3_8b actor.backend=te parallel.tp_size=2 parallel.dp_size=4
    python benchmarks/update_mfu.py --layers 8 model=qwen3_8b      fewer layers, for fewer GPUs
    python benchmarks/update_mfu.py                                the bundled model; needs no GPU

Words at the end are knobs, as `python -m megarl.train` takes them. The model's shape comes from a local folder or the
bundled config files, and the peak from the card's data sheet or `cluster.gpu_tflops`. The script starts one rank by
torchrun for each rank of the layout; under torchrun it is a rank.

Each update is one optimizer step over a new batch of GRPO groups with log-normal lengths. The first ones warm up; the
median of the others counts. FLOPs are `SequenceCost` of the model as it ran: the forward pass, and twice that for
backward. Activations that are computed again do not count. The LM head counts for every token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from kernel_roofline import GPUS
from ppo_update import make_batch
from timing import machine, parse, record, synchronize, with_warm_allocator
from transformers import PretrainedConfig

from megarl import cli
from megarl.actor.batch.balance import SequenceCost
from megarl.actor.policy import MegatronPPOActor
from megarl.algorithms import GRPO, GRPOConfig
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.preflight.shapes import folder_of
from megarl.types import PackedBatch


def update_flops(model: PretrainedConfig, lengths: Sequence[int]) -> float:
    """FLOPs of forward and backward over sequences of these lengths in tokens; backward costs twice the forward."""
    cost = SequenceCost.of(model)
    return 3 * sum(cost(tokens) for tokens in lengths)


def peak_tflops(config: Config, knobs: Sequence[str], card: str) -> float:
    """The peak that MFU is a share of: cluster.gpu_tflops where it is given or `card` is "", else the card's own.

    Raises:
        UserError: no data sheet of this card is known here.
    """
    if not card or any(knob.startswith("cluster.gpu_tflops=") for knob in knobs):
        return config.cluster.gpu_tflops
    for name, (speed, _) in GPUS.items():
        if name in card and "PCIe" not in card:
            return speed.flops / 1e12
    raise UserError(
        f"the bfloat16 peak of {card} is not known here, only that of {', '.join(GPUS)} (SXM); set cluster.gpu_tflops"
    )


def with_layers(path: str, layers: int, folder: Path) -> tuple[Path, int, int]:
    """A model's folder, cut to its first `layers` layers (0: all) in `folder`; layers that run, and all of them.

    Raises:
        UserError: the model has fewer layers.
    """
    source = folder_of(path)
    fields = json.loads((source / "config.json").read_text())
    all_layers = int(fields["num_hidden_layers"])
    if not 0 <= layers <= all_layers:
        raise UserError(f"--layers {layers} is not in 1..{all_layers}, the layers of {path}; 0 takes all of them")
    if layers in (0, all_layers):
        return source, all_layers, all_layers
    fields["num_hidden_layers"] = layers
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, layers, all_layers


def run(args: argparse.Namespace, config: Config, folder: Path) -> None:
    """Runs a rank. Rank 0 prints and records the figures."""
    path, layers, all_layers = with_layers(config.actor.path, args.layers, folder)
    device, world = platform.device().type, config.parallel.world_size()
    tflops = peak_tflops(config, args.knobs, torch.cuda.get_device_name() if device == "cuda" else "")
    engine = dataclasses.replace(config.actor, path=str(path), init="random")
    actor = MegatronPPOActor(engine, GRPO(GRPOConfig(n_minibatches=1)), config.parallel)
    actor.initialize()
    model = read_config(str(path))
    args.vocab = model.vocab_size
    updates: list[tuple[float, PackedBatch]] = []
    for number in range(args.warm + args.updates):
        batch, _, _ = make_batch(args, seed=number)
        batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        actor.ppo_update(batch)
        synchronize(device)
        dist.barrier()  # the slowest rank's time is the update's
        updates.append((time.perf_counter() - began, batch))
    counted = updates[args.warm :]
    flops = [update_flops(model, batch.lengths.tolist()) for _, batch in counted]
    peak = tflops * 1e12 * world
    mfu = statistics.median(f / (seconds * peak) for f, (seconds, _) in zip(flops, counted, strict=True))
    speed = statistics.median(batch.total_tokens / seconds / world for seconds, batch in counted)
    if actor.groups.rank == 0:
        name = Path(config.actor.path).name
        shown = f"{layers} of {all_layers} layers" if layers < all_layers else f"all {layers} layers"
        print(f"# {machine(device)}; {name}, {shown}, {engine.dtype}, {world} ranks, actor.backend={engine.backend}")
        print(
            f"{speed:,.0f} tokens/s a GPU, MFU {mfu:.3%} of {tflops:g} TFLOP/s with {shown}; "
            f"medians of {len(counted)} updates of {statistics.mean(b.total_tokens for _, b in counted):,.0f} tokens"
        )
        labels = {"device": device, "model": name, "ranks": world, "dtype": engine.dtype}
        record("MFU", mfu, "share", **labels)
        record("update speed", speed, "tokens/s a GPU", **labels)
        record("layers", layers, f"of {all_layers} layers", **labels)
        record("FLOPs of an update", statistics.median(flops), "FLOPs", **labels)
        record("time of an update", statistics.median(seconds for seconds, _ in counted), "s", **labels)
    actor.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = "as for megarl.train, such as model=qwen3_8b; the bundled model without any"
    parser.add_argument("knobs", nargs="*", default=["model=tiny"], metavar="KNOB=VALUE", help=what)
    parser.add_argument("--layers", type=int, default=0, help="the model's first layers alone; 0: all")
    for name, default in (("prompts", 4), ("samples", 4), ("prompt", 64), ("completion", 64), ("max-new", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the batch, as in ppo_update.py")
    parser.add_argument("--warm", type=int, default=2, help="updates before those that count")
    parser.add_argument("--updates", type=int, default=5, help="updates that count")
    args = parse(parser)
    try:
        config = cli.composed(args.knobs)
        ranks = config.parallel.world_size()
        if "RANK" not in os.environ:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])
        if int(os.environ["WORLD_SIZE"]) != ranks:
            raise UserError(
                f"torchrun started {os.environ['WORLD_SIZE']} ranks and the layout has {ranks}; let them agree"
            )
        if platform.device().type == "cpu":
            torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="megarl-mfu-") as folder:
            run(args, config, Path(folder))
    except UserError as error:
        sys.exit(f"update_mfu: {error}")


if __name__ == "__main__":
    with_warm_allocator()
    main()
