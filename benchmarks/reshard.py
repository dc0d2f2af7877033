"""The exact path against full gather and broadcast: a Megatron trainer of tp 2 to an SGLang server of tp 2, on gloo.

Both paths run in the same processes and take turns, round by round. The first push of each turn joins and warms up, the
second is timed. The model is random, with 200 M float32 parameters. Printed are

- bytes received by each server rank over the lower bound, the bytes it holds;
- seconds from the first byte to the last rank's report that its weights are in place, with and without digests;
- the peak of each rank's anonymous and shared memory above its start, before its first sync by that path. Mapped files,
  such as libraries, do not count.

    python benchmarks/reshard.py
"""

from __future__ import annotations

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
from timing import machine
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
TP = 2
ROUNDS = 5
PATHS = ("full", "exact")  # the order in which memory is measured: full keeps no buffers that exact would reuse
MODEL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}


def moved_s(report: SyncReport) -> float:
    """Seconds to move the weights; pausing, joining and planning cost the same on both paths."""
    return sum(report.seconds[phase] for phase in ("transfer", "apply", "verify"))


def trainer(folder: str, address: str, api_key: str) -> None:
    """Runs a trainer rank: two pushes by each path while memory is watched, then all rounds. Rank 0 prints results."""
    torch.set_num_threads(1)
    engine = MegatronEngine(EngineConfig(path=folder, init="random"), ParallelConfig(tp_size=TP))
    engine.initialize()
    session = WeightSession(ReshardConfig(), [address], api_key)
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory, which later buffers would hide in
    print(json.dumps({"ready": os.getpid()}), flush=True)
    sys.stdin.readline()

    def push(path: str, verify: str) -> SyncReport:
        session.config = dataclasses.replace(session.config, path=path, verify=verify)
        return session.push(engine, session.version + 1)

    received = {}
    for path in PATHS:
        for _ in range(2):
            received[path] = push(path, "always").received
        print(json.dumps({"done": path}), flush=True)
        sys.stdin.readline()
    seconds: dict[str, list[float]] = {}
    for verify in ("off", "always"):
        for _ in range(ROUNDS):
            for path in PATHS:
                push(path, verify)
                report = push(path, verify)
                if engine.groups.rank == 0:
                    seconds.setdefault(f"{path} {verify}", []).append(moved_s(report))
    parameters = sum(tensor.numel() if engine.groups.rank == 0 else 0 for _, tensor in engine.named_weights())
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    print(json.dumps({"seconds": medians, "received": received, "parameters": parameters}), flush=True)
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


def measure(folder: Path) -> None:
    Qwen3Config(**MODEL, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    config = SGLangServerConfig(device="cpu", tp_size=TP, max_total_tokens=1024, ready_timeout_s=400)
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    with SGLangServers(config, folder, folder, WEIGHT_LOADER, dummy) as servers:
        servers.start()
        servers.wait_ready()
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(TP)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder), servers.addresses[0], servers.api_key],
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(TP)
        ]
        try:
            pids = [line["ready"] for line in ask(ranks)] + schedulers(servers)
            peaks: dict[str, list[int]] = {}
            for path in PATHS:
                memory = Memory(pids)
                go(ranks)
                ask(ranks)
                peaks[path] = memory.end()
            go(ranks)
            show(ask(ranks)[0], peaks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def show(results: dict[str, Any], peaks: dict[str, list[int]]) -> None:
    bound, seconds = results["received"]["exact"], results["seconds"]
    needed = results["parameters"] * 4 / TP
    print(f"{machine('cpu')}; {results['parameters'] / 1e6:.0f} M float32 parameters, tp {TP} -> tp {TP}, gloo")
    print("| path | received per server rank / lower bound | seconds | with digests | peak above start, MiB by rank |")
    print("|---|---|---|---|---|")
    for path in ("exact", "full"):
        ratios = ", ".join(f"{n / needed:.3f}" for n in results["received"][path])
        peak = ", ".join(f"{n / MIB:.0f}" for n in peaks[path])
        print(f"| {path} | {ratios} | {seconds[f'{path} off']:.3f} | {seconds[f'{path} always']:.3f} | {peak} |")
    faster = [seconds[f"full {verify}"] / seconds[f"exact {verify}"] for verify in ("off", "always")]
    print(f"exact is {faster[0]:.2f}x faster without digests, {faster[1]:.2f}x with; a bucket is 64 MiB; {bound} bytes")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        trainer(*sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory(prefix="megarl-reshard-") as scratch:
            began = time.monotonic()
            measure(Path(scratch))
            print(f"({time.monotonic() - began:.0f} s in all)")
