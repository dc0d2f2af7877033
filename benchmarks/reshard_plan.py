"""Plans weight syncs from configs alone, no weights: time and peak memory of planning, and what plans save.

    OMP_NUM_THREADS=1 python benchmarks/reshard_plan.py

First the largest case, in a process of its own: 1,024 trainer ranks of Qwen3-235B-A22B to 64 servers of TP 8. Then, for
three models, the bytes that a server rank receives by the plan and by a full broadcast. The full broadcast gathers full
tensors and sends them to every server rank. Last, 512 servers, with and without relays. Everything is simulated:
nothing is sent. Floors are bytes at --gb-s a rank; simulated times add what ranks wait for each other.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from timing import machine
from transformers import AutoConfig

from megarl.actor.weights.shards import world_table
from megarl.parallel.config import ParallelConfig
from megarl.preflight.sync_report import duration, size, summarise
from megarl.reshard.plan.holdings import Topology
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.relay import AUTO, OFF
from megarl.reshard.plan.sglang_layout import server_holdings
from megarl.reshard.plan.transfer_plan import NO_RELAY, TransferPlan

CONFIGS = Path(__file__).parents[1] / "assets/configs"
BUCKET_BYTES = 64 * 2**20
GPUS = 8  # of a node
LARGEST = "Qwen/Qwen3-235B-A22B"
# 94 layers on 8 stages: 11 on the first and the last, 12 on the others
OF_235B = ParallelConfig(
    tp_size=4, pp_size=8, dp_size=32, ep_size=32, etp_size=1, first_stage_layers=11, last_stage_layers=11
)
CASES = (  # model, trainer's layout, SGLang's tp and ep, servers
    ("Qwen/Qwen3-8B", ParallelConfig(tp_size=2, dp_size=8), 1, 1, 16),
    ("Qwen/Qwen3-8B", ParallelConfig(tp_size=2, dp_size=8), 2, 1, 8),
    ("meta-llama/Llama-3.3-70B-Instruct", ParallelConfig(tp_size=8, pp_size=4, dp_size=2), 8, 1, 8),
    (LARGEST, OF_235B, 8, 1, 64),
    (LARGEST, OF_235B, 8, 8, 64),
    (LARGEST, OF_235B, 16, 16, 32),
    (LARGEST, OF_235B, 32, 32, 16),
)


HUNDREDS = (  # model, trainer's layout, SGLang's tp and ep, servers
    ("Qwen/Qwen3-8B", ParallelConfig(tp_size=2, dp_size=8), 1, 1, 512),
    ("meta-llama/Llama-3.3-70B-Instruct", ParallelConfig(tp_size=8, pp_size=4, dp_size=2), 8, 1, 512),
    (LARGEST, OF_235B, 8, 1, 512),
)


def planned(
    model: str, parallel: ParallelConfig, tp_size: int, ep_size: int, n_servers: int, relay: str = OFF
) -> TransferPlan:
    config = AutoConfig.from_pretrained(CONFIGS / model)
    return plan(
        source_holdings(world_table(config, parallel)),
        server_holdings(config, tp_size=tp_size, ep_size=ep_size, n_servers=n_servers),
        Topology.of_sizes(parallel.world_size(), [tp_size] * n_servers, GPUS),
        BUCKET_BYTES,
        relay=relay,
    )


def measure() -> None:
    """Prints, as JSON, the CPU seconds, wall time and peak memory of the largest case.

    It covers reading configs, tables, plan, proofs and hash. Beside it, the CPU seconds in which a rank takes its own
    part out of the plan.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start, wall = time.process_time(), time.perf_counter()
    transfer_plan = planned(LARGEST, OF_235B, 8, 1, 64)
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    start = time.process_time()
    parts = len(list(transfer_plan.sends(0))) + len(list(transfer_plan.receives(0)))
    own_part = (time.process_time() - start) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results = {"seconds": seconds, "wall": wall, "own": own_part, "before": before, "peak": peak, "parts": parts}
    print(json.dumps(results))


def largest() -> None:
    out = subprocess.run([sys.executable, __file__, "--measure"], capture_output=True, text=True, check=True)
    results = json.loads(out.stdout.splitlines()[-1])
    print(f"{LARGEST}, 1,024 trainer ranks to 64 servers of TP 8, one core:")
    seconds, wall = results["seconds"], results["wall"]
    print(f"  plan, proofs and hash   {seconds:.1f} CPU seconds ({seconds / 10:.0%} of the 10 s allowed)")
    print(f"  wall time               {wall:.1f} s")
    print(f"  peak memory             {size(results['peak'])} ({results['peak'] / 4e9:.0%} of the 4 GB allowed)")
    print(f"  of which libraries      {size(results['before'])}")
    print(f"  one rank's own part     {results['own'] * 1e3:.0f} ms")


def table(bandwidth: float) -> None:
    columns = (
        "model",
        "trainer ranks",
        "servers",
        "a rank holds",
        "plan",
        "broadcast",
        "ratio",
        "busiest",
        "floor, simulated, broadcast",
    )
    print(" | ".join(columns))
    for model, parallel, tp_size, ep_size, n_servers in CASES:
        transfer_plan = planned(model, parallel, tp_size, ep_size, n_servers)
        summary = summarise(transfer_plan)
        times = summary.seconds(bandwidth), simulated(transfer_plan, bandwidth), summary.full_bytes / bandwidth
        layout = f"TP {tp_size}" + (f" EP {ep_size}" if ep_size > 1 else "")
        cells = (
            model.partition("/")[2],
            str(parallel.world_size()),
            f"{n_servers} of {layout}",
            size(int(summary.needed.max())),
            f"{summary.ratio:.2f}",
            size(summary.full_bytes),
            f"{summary.saving:.1f}",
            f"{summary.sent.imbalance:.2f}",
            ", ".join(duration(seconds) for seconds in times),
        )
        print(" | ".join(cells))


def simulated(transfer_plan: TransferPlan, bandwidth: float) -> float:
    """Seconds until the last message has arrived, if a rank sends one and receives one message at a time, in order.

    A relay sends a bucket on once it has all of it. Copies, latency and digests take no time.
    """
    messages, sources = transfer_plan.messages, len(transfer_plan.topology.source_node)
    sender = np.where(messages.relay == NO_RELAY, messages.source, sources + messages.relay)
    cost = (transfer_plan.buckets.nbytes[messages.bucket] / bandwidth).tolist()
    sends, receives = [0.0] * (sources + len(transfer_plan.topology.node)), [0.0] * len(transfer_plan.topology.node)
    arrived: dict[tuple[int, int], float] = {}  # of the buckets that are sent on
    kept = set(np.unique(messages.relay).tolist())
    rows = zip(sender.tolist(), messages.destination.tolist(), messages.bucket.tolist(), cost, strict=True)
    for source, destination, bucket, seconds in rows:
        has = arrived[source - sources, bucket] if source >= sources else 0.0
        end = max(sends[source], receives[destination], has) + seconds
        sends[source] = receives[destination] = end
        if destination in kept:
            arrived[destination, bucket] = end
    return max(receives)


def relay_table(bandwidth: float) -> None:
    columns = ("model", "trainer ranks", "servers", "", "a trainer rank sends", "a server rank sends on", "to ranks")
    print(" | ".join((*columns, "simulated", "a server rank's own bytes", "planning")))
    for case in HUNDREDS:
        model, parallel, tp_size, _, n_servers = case
        for relay in (OFF, AUTO):
            start = time.process_time()
            transfer_plan = planned(*case, relay=relay)
            seconds = time.process_time() - start
            cells = (
                model.partition("/")[2],
                str(parallel.world_size()),
                f"{n_servers} of TP {tp_size}",
                "direct" if relay == OFF else "relays",
                size(int(transfer_plan.bytes_out.max())),
                size(int(transfer_plan.bytes_forwarded.max())),
                str(
                    len(
                        {
                            message.peer
                            for message in transfer_plan.forwards(int(transfer_plan.bytes_forwarded.argmax()))
                        }
                    )
                ),
                duration(simulated(transfer_plan, bandwidth)),
                duration(int(transfer_plan.bytes_needed.max()) / bandwidth),
                f"{seconds:.1f} CPU s",
            )
            print(" | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-s", type=float, default=50.0, help="GB/s of a rank, each way; 50: one 400 Gbit/s port")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure()
        return
    print(machine("cpu"))
    largest()
    print()
    table(args.gb_s * 1e9)
    print()
    relay_table(args.gb_s * 1e9)


if __name__ == "__main__":
    main()
