"""The exact path against full gather and broadcast: a Megatron trainer of tp 2 to an SGLang server of tp 2, on gloo.

Both paths run in the same processes and take turns, round by round. The first push of each turn joins and warms up, the
second is timed. The model is random, with 200 M float32 parameters. Other transports have one path and are timed alone.
Printed are

- bytes received by each server rank over the lower bound, the bytes it holds;
- seconds from the first byte to the last rank's report that its weights are in place, with and without digests;
- for the exact path, these seconds over its bandwidth bound, and the digests' seconds as a share of it. The bound is a
  plain copy of the same bytes between the same ranks by the same transport (`acceptance/plain_copy.py`);
- the peak of each rank's anonymous and shared memory above its start, before its first sync by that path. Mapped files,
  such as libraries, do not count. On GPUs it is not measured.

    python benchmarks/reshard.py [--device cuda] [--transport nccl] [--same-gpus] [--tp 2] [--dtype bfloat16]

On GPUs trainer rank i has GPU i, and the server has the `tp` GPUs behind them, or with `--same-gpus` the same ones.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from acceptance.plain_copy import copy_seconds
from timing import machine, parse, record
from transformers import Qwen3Config

from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.parallel.config import ParallelConfig
from megarl.reshard.config import ReshardConfig
from megarl.reshard.session import SyncReport, WeightSession
from megarl.reshard.sync.sglang_hooks import WEIGHT_LOADER
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers

MIB = 2**20
# Paths by transport, in the order in which memory is measured: full keeps no buffers that exact would reuse.
PATHS = {"gloo": ("full", "exact"), "disk": ("full",), "shm": ("exact",), "nccl": ("exact",), "cuda_ipc": ("exact",)}


def model(args: argparse.Namespace) -> Qwen3Config:
    head_dim = 128 if args.device == "cuda" else 64  # models for GPUs have 128
    heads = max(2, args.hidden // head_dim)
    return Qwen3Config(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        intermediate_size=3 * args.hidden,
        vocab_size=32000,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )


def moved_s(report: SyncReport) -> float:
    """Seconds to move the weights; pausing, joining and planning cost the same on both paths."""
    return sum(report.seconds[phase] for phase in ("transfer", "apply", "verify"))


def trainer(args: argparse.Namespace, folder: str, address: str, api_key: str) -> None:
    """Runs a trainer rank: two pushes by each path while memory is watched, then all rounds. Rank 0 prints results."""
    torch.set_num_threads(1)
    paths = PATHS[args.transport]
    engine = MegatronEngine(EngineConfig(path=folder, init="random", dtype=args.dtype), ParallelConfig(tp_size=args.tp))
    engine.initialize()
    files = f"{folder}/weights" if args.transport == "disk" else ""
    knobs = ReshardConfig(path=paths[0], transport=args.transport, folder=files)
    session = WeightSession(knobs, [address], api_key)
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, which later buffers would hide in
    print(json.dumps({"ready": os.getpid()}), flush=True)
    sys.stdin.readline()

    def push(path: str, verify: str) -> SyncReport:
        session.config = dataclasses.replace(session.config, path=path, verify=verify)
        return session.push(engine, session.version + 1)

    received, verified = {}, 0
    for path in paths:
        for _ in range(2):
            report = push(path, "always")
            received[path], verified = report.received, report.verified
        print(json.dumps({"done": path}), flush=True)
        sys.stdin.readline()
    seconds: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for verify in ("off", "always"):  # in turns: their difference is the digests' time
            for path in paths:
                push(path, verify)
                report = push(path, verify)
                if engine.groups.rank == 0:
                    seconds.setdefault(f"{path} {verify}", []).append(moved_s(report))
    parameters = sum(tensor.numel() if engine.groups.rank == 0 else 0 for _, tensor in engine.named_weights())
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    results = {"seconds": medians, "received": received, "verified": verified, "parameters": parameters}
    print(json.dumps(results), flush=True)
    session.close()
    engine.destroy()


def held_bytes(pid: int) -> int:
    """A process's resident memory without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Memory:
    """Peak memory of processes above their memory at the start, sampled every 2 ms."""

    def __init__(self, pids: list[int]):
        self.pids = pids
        self.before = [held_bytes(pid) for pid in pids]
        self.peak = [0] * len(pids)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            for i, pid in enumerate(self.pids):
                self.peak[i] = max(self.peak[i], held_bytes(pid) - self.before[i])

    def end(self) -> list[int]:
        self._ended.set()
        self._thread.join()
        return self.peak


def schedulers(servers: SGLangServers) -> list[int]:
    process = servers.servers[0].process
    assert process is not None
    return [p.pid for p in psutil.Process(process.pid).children(recursive=True) if "scheduler" in p.name()]


def ask(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """Waits for the next line of JSON from each rank."""
    lines = []
    for rank in ranks:
        assert rank.stdout is not None
        while (line := rank.stdout.readline())[:1] != "{":
            if not line:
                raise RuntimeError("a trainer rank ended early")
        lines.append(json.loads(line))
    return lines


def go(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def measure(args: argparse.Namespace, folder: Path) -> None:
    model(args).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    config = SGLangServerConfig(
        device=args.device, tp_size=args.tp, dtype=args.dtype, max_total_tokens=1024, ready_timeout_s=400
    )
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(args.tp)}
    first_gpu = 0 if args.same_gpus else args.tp
    with SGLangServers(config, folder, folder, WEIGHT_LOADER, dummy, first_gpu=first_gpu) as servers:
        servers.start()
        servers.wait_ready()
        server = [str(folder), servers.addresses[0], servers.api_key]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--trainer", *server],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(args.tp)
        ]
        try:
            pids = [line["ready"] for line in ask(ranks)] + schedulers(servers)
            peaks: dict[str, list[int]] = {}
            for path in PATHS[args.transport]:
                memory = Memory(pids)
                go(ranks)
                ask(ranks)
                peaks[path] = memory.end()
            go(ranks)
            results = ask(ranks)[0]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if "exact" in PATHS[args.transport]:  # once the server has given its processors and memory back
        gpus = [*range(args.tp), *range(first_gpu, first_gpu + args.tp)] if args.device == "cuda" else []
        results["bound"] = copy_seconds(args.transport, results["received"]["exact"], gpus, args.rounds)
    show(args, results, peaks)


def show(args: argparse.Namespace, results: dict[str, Any], peaks: dict[str, list[int]]) -> None:
    seconds, tp = results["seconds"], args.tp
    size = results["parameters"] * getattr(torch, args.dtype).itemsize
    parameters = f"{results['parameters'] / 1e6:.0f} M {args.dtype} parameters"
    print(f"{machine(args.device)}; {parameters}, tp {tp} -> tp {tp}, {args.transport}")
    print("| path | received per server rank / lower bound | seconds | with digests | peak above start, MiB by rank |")
    print("|---|---|---|---|---|")
    for path in reversed(PATHS[args.transport]):
        ratios = [n / (size / tp) for n in results["received"][path]]
        plain, digests = seconds[f"{path} off"], seconds[f"{path} always"]
        peak = ", ".join(f"{n / MIB:.0f}" for n in peaks[path]) if args.device == "cpu" else "-"
        print(f"| {path} | {', '.join(f'{r:.3f}' for r in ratios)} | {plain:.3f} | {digests:.3f} | {peak} |")
        labels = {"device": args.device, "transport": args.transport, "path": path}
        record("received over the lower bound", max(ratios, default=0.0), "x", **labels)
        record("sync", plain, "s", **labels)
        record("sync with digests", digests, "s", **labels)
        record("weights a second", size / plain / 1e9, "GB/s", **labels)
        if path == "exact":
            report_bound(results["bound"], plain, digests, sum(results["received"][path]), labels)
    record("tensor parts proven equal", results["verified"], "parts", device=args.device, transport=args.transport)
    if args.transport == "gloo":
        faster = [seconds[f"full {verify}"] / seconds[f"exact {verify}"] for verify in ("off", "always")]
        print(f"exact is {faster[0]:.2f}x faster without digests, {faster[1]:.2f}x with; a bucket is 64 MiB")
    if not results["verified"]:
        raise SystemExit("no tensor was proven equal on the server")


def report_bound(bound: float, plain: float, digests: float, nbytes: int, labels: dict[str, str | int]) -> None:
    """Prints and records a sync's seconds, without and with digests, against the `bound` seconds of a plain copy."""
    over, share, speed = plain / bound, (digests - plain) / bound, nbytes / bound / 1e9
    record("plain copy", speed, "GB/s", **labels)
    record("time over bound", over, "x", **labels)
    record("digests' share of the bound", share, "share", **labels)
    print(f"a plain copy takes {bound:.3f} s, {speed:.2f} GB/s: sync {over:.2f}x, digests {share:.1%} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=PATHS, default="gloo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--same-gpus", action="store_true", help="the server shares the trainer's GPUs")
    for name, default in (("tp", 2), ("rounds", 5), ("hidden", 1024), ("layers", 14)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    args = parse(parser)
    if args.trainer:
        trainer(args, *args.trainer)
        return
    with tempfile.TemporaryDirectory(prefix="megarl-reshard-") as scratch:
        began = time.monotonic()
        measure(args, Path(scratch))
        print(f"({time.monotonic() - began:.0f} s in all)")


if __name__ == "__main__":
    main()
