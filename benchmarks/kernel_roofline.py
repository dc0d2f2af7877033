"""The CUDA kernels' limits, computed: registers, spills, occupancy, bytes and expected times. Needs nvcc, no GPU.

    python benchmarks/kernel_roofline.py [--tokens 16384] [--vocab 151936] [--hidden 4096] [--no-build]

The first table is the report of ptxas. The others are arithmetic on the peak rates of NVIDIA's data sheets. The second
compares the row kernel's bytes with the latency that its blocks must hide. The third has the other kernels' bytes, the
fourth the LM head's chunks, by `megarl/ops/head_chunks.py`.
Nothing here is measured; `benchmarks/logprob.py` and `benchmarks/linear_logprobs.py` measure on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from timing import parse, record

from megarl.ops.head_chunks import LEAST_ROWS, ChunkCost, GpuSpeed, gpu_chunk_rows

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "csrc").glob("*/cuda.cu"))
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
BUILD_LIMIT_S = 600.0  # of all files, on a busy machine

# Dense bfloat16 operations and bytes per second of the SXM boards, and memory in GiB, from the data sheets.
GPUS = {
    "A100": (GpuSpeed(312e12, 2.039e12, 108), 80),
    "H100": (GpuSpeed(989e12, 3.35e12, 132), 80),
    "H200": (GpuSpeed(989e12, 4.8e12, 132), 141),
    "B200": (GpuSpeed(2250e12, 8.0e12, 148), 180),
}

# Of an SM, on all three architectures (CUDA C++ programming guide, compute capabilities).
REGISTERS, WARPS, BLOCKS, REGISTER_UNIT = 65536, 64, 32, 256
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90a": 228 << 10, "sm_100": 228 << 10}
SHARED_RESERVED = 1 << 10  # of a block

LATENCY_S = 0.8e-6  # of a load from busy device memory; assumed, equal for all GPUs
MERGE_S = 0.06e-6  # one merge of two threads' statistics; assumed
BYTES_IN_FLIGHT = 64  # of a thread, `kGroups` in csrc/logprob/cuda.cu


@dataclass(frozen=True)
class Kernel:
    """A kernel in the report of ptxas."""

    name: str  # with its template arguments
    architecture: str
    registers: int
    spill_bytes: int  # stores and loads
    stack_bytes: int
    shared_bytes: int
    threads: int  # most of a block, by its launch bounds; 0: none declared

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit an SM at once."""
        warps = math.ceil(self.threads / 32)
        by_registers = REGISTERS // (math.ceil(32 * self.registers / REGISTER_UNIT) * REGISTER_UNIT * warps)
        by_shared = SHARED_BYTES[self.architecture] // (self.shared_bytes + SHARED_RESERVED)
        return min(by_registers, WARPS // warps, BLOCKS, by_shared)

    @property
    def occupancy(self) -> float:
        """Warps in flight over the most that an SM takes."""
        return self.blocks_per_sm * math.ceil(self.threads / 32) / WARPS


def compiled(folder: Path, architectures: Iterable[str] = ARCHITECTURES) -> list[Kernel]:
    """Compiles every kernel for every architecture into `folder`, one file at a time, and reads the reports of ptxas.

    Raises:
        RuntimeError: nvcc is missing, or refuses a file.
    """
    if not shutil.which("nvcc"):
        raise RuntimeError("nvcc is not on PATH; install the CUDA toolkit, or pass --no-build")
    targets = [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in architectures]
    kernels: list[Kernel] = []
    for source in SOURCES:
        place = folder / source.parent.name
        place.mkdir()
        command = ["nvcc", "-std=c++17", "-O3", "-Xptxas=-v", "--keep", "--keep-dir", str(place), *targets, "-c"]
        command += [str(source), "-o", str(place / "kernels.o")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"nvcc refuses {source}: {done.stderr}")
        bounds = launch_bounds("".join(path.read_text() for path in place.glob("*.ptx")))
        kernels += report(done.stderr, bounds)
    return kernels


def launch_bounds(ptx: str) -> dict[str, int]:
    """Most threads of a block by a kernel's mangled name, of the kernels that declare them."""
    entries = re.findall(r"\.entry (\w+)\((.*?)\{", ptx, re.S)
    bounds = {name: re.search(r"\.maxntid (\d+)", head) for name, head in entries}
    return {name: int(found[1]) for name, found in bounds.items() if found}


def report(log: str, bounds: dict[str, int]) -> list[Kernel]:
    """Reads what `ptxas -v` wrote."""
    kernels = []
    for block in log.split("Compiling entry function '")[1:]:
        name, architecture = re.match(r"(\w+)' for '(\w+)'", block).groups()  # type: ignore[union-attr]
        stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+) .*?, (\d+)", block).groups())  # type: ignore[union-attr]
        shared = re.search(r"(\d+) bytes smem", block)
        kernels.append(
            Kernel(
                name,
                architecture,
                registers=int(re.search(r"Used (\d+) registers", block)[1]),  # type: ignore[index]
                spill_bytes=stores + loads,
                stack_bytes=stack + (1 if " lmem" in block else 0),
                shared_bytes=int(shared[1]) if shared else 0,
                threads=bounds.get(name, 0),
            )
        )
    return kernels


def readable(names: list[str]) -> list[str]:
    """Names of kernels without namespaces and arguments."""
    demangled = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True).stdout.splitlines()
    short = [
        re.sub(r"^void |megarl::|\(anonymous namespace\)::|\(.*?Args\)$|\((int|bool)\)", "", name) for name in demangled
    ]
    return [re.sub(r"\([^()]*\)$", "", name) for name in short]


def print_kernels(kernels: list[Kernel]) -> None:
    print("| kernel | registers | spills | shared bytes | threads | blocks an SM | occupancy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    names = dict(zip((names := sorted({k.name for k in kernels})), readable(names), strict=True))
    for name, variants in itertools.groupby(sorted(kernels, key=lambda k: k.name), key=lambda k: k.name):
        by_arch = sorted(variants, key=lambda k: ARCHITECTURES.index(k.architecture))
        cells = [
            _merged(str(k.registers) for k in by_arch),
            _merged(str(k.spill_bytes + k.stack_bytes) for k in by_arch),
            _merged(str(k.shared_bytes) for k in by_arch),
            str(by_arch[0].threads or "not bounded"),
            *(
                [_merged(str(k.blocks_per_sm) for k in by_arch), _merged(f"{k.occupancy:.0%}" for k in by_arch)]
                if by_arch[0].threads
                else ["", ""]
            ),
        ]
        print(f"| `{names[name]}` | {' | '.join(cells)} |")
        for k in by_arch:
            record("registers", k.registers, "registers", kernel=names[name], architecture=k.architecture)


def _merged(cells: Iterator[str]) -> str:
    """One cell if all architectures agree, else one number for each, in their order."""
    values = list(cells)
    return values[0] if len(set(values)) == 1 else " / ".join(values)


@dataclass(frozen=True)
class RowBlocks:
    """One block a row: what a block needs alone, and what it may take while all blocks keep the memory busy."""

    row_bytes: int
    threads: int
    blocks_per_sm: int
    speed: GpuSpeed

    @property
    def needs(self) -> float:
        """Seconds of a block by latency: label, one wait for each round of loads, and the reduction."""
        rounds = math.ceil(self.row_bytes / (self.threads * BYTES_IN_FLIGHT))
        merges = 5 + self.threads // 32 - 1  # lanes of a warp in a tree, then the warps in turn
        return (1 + rounds) * LATENCY_S + merges * MERGE_S

    @property
    def may_take(self) -> float:
        """Seconds of a block at which an SM's blocks read as fast as its share of the memory."""
        return self.blocks_per_sm * self.row_bytes * self.speed.sms / self.speed.bandwidth

    def waves(self, rows: int) -> float:
        """Rounds of blocks; the last one may leave SMs idle."""
        return rows / (self.blocks_per_sm * self.speed.sms)


def print_rows(tokens: int) -> None:
    """The forward row kernel in bfloat16: expected time, and how much of the latency its blocks hide."""
    print("| V | GPU | bytes | expected | blocks of | a block may take | needs | slack | rounds of blocks |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for vocab, (name, (speed, _)), threads in itertools.product((32000, 151936), GPUS.items(), (512, 128)):
        row = RowBlocks(2 * vocab, threads, 1024 // threads, speed)
        total = tokens * row.row_bytes
        slack = row.may_take / row.needs
        cells = [f"{vocab}", name, f"{total / 1e6:,.0f} MB", f"{total / speed.bandwidth * 1e6:,.0f} us", f"{threads}"]
        cells += [
            f"{row.may_take * 1e6:.1f} us",
            f"{row.needs * 1e6:.1f} us",
            f"{slack:.1f}x",
            f"{row.waves(tokens):.1f}",
        ]
        print(f"| {' | '.join(cells)} |")
        record("slack of a row's block", slack, "x", gpu=name, vocab=vocab, threads=threads)


STREAMS = {  # kernels that read and write each number once, but for what a cache holds: inputs, bytes of an input
    "`leaf_digests`, a byte": (1 << 30, 1 + 16 / 65536),
    "`quantize_fp8`, a bfloat16 weight": (1 << 29, 2 + 1 + 4 / 128**2),  # its second reading comes from the cache
    "`quantize_int4`, a bfloat16 weight": (1 << 29, 2 + 1 / 2 + 2 / 128),  # groups of 128
    "`policy_loss`, a float32 token": (1 << 20, 4 * 4 + 1 + 2 * 4),  # with entropy; no KL, no correction
    "`gae`, a float32 token": (1 << 20, 2 * 4 + 1 + 2 * 4),
    "`moments`, a float32 token": (1 << 20, 4 + 1),
    "`whiten`, a float32 token": (1 << 20, 4 + 1 + 4),
}


def print_streams() -> None:
    """Kernels that are bound by memory at most: bytes, and the time that these take at full bandwidth."""
    print("| kernel, input | inputs | bytes | " + " | ".join(GPUS) + " |")
    print("| --- | --- | --- |" + " --- |" * len(GPUS))
    for name, (count, each) in STREAMS.items():
        seconds = {gpu: count * each / speed.bandwidth for gpu, (speed, _) in GPUS.items()}
        times = " | ".join(f"{time * 1e6:,.1f} us" for time in seconds.values())
        print(f"| {name} | {count:,} | {count * each / 1e6:,.0f} MB | {times} |")
        for gpu, time in seconds.items():
            record("time at full bandwidth", time, "s", gpu=gpu, kernel=name)


def print_chunks(tokens: int, vocab: int, hidden: int) -> None:
    """The LM head, forward and backward, by rows of a chunk: intensity and expected time over all logits at once."""
    sizes = [128 * 2**i for i in range(7)]
    print("| GPU | gradient summed in | balance | " + " | ".join(f"{n} rows" for n in sizes) + " | chosen | logits |")
    print("| --- | --- | --- |" + " --- |" * (len(sizes) + 2))
    for (name, (speed, gib)), (dtype, grad) in itertools.product(GPUS.items(), (("bf16", 2), ("fp32", 4))):
        cost = ChunkCost(hidden, vocab, speed, logit_bytes=2, grad_bytes=grad)
        whole = ChunkCost(hidden, vocab, speed, logit_bytes=2, grad_bytes=2).seconds(tokens)
        cells = [f"{cost.intensity(n):.0f}: {cost.all_seconds(tokens, n) / whole:.2f}x" for n in sizes]
        rows = gpu_chunk_rows(tokens, cost, gib << 30)
        slowdown = cost.all_seconds(tokens, rows) / whole
        chosen = f"{rows}: {slowdown:.2f}x, {cost.all_seconds(tokens, rows) * 1e3:.1f} ms"
        print(f"| {name} | {dtype} | {speed.balance:.0f} | {' | '.join(cells)} | {chosen} | {rows / tokens:.1%} |")
        record("expected time over all logits", slowdown, "x", gpu=name, gradient=dtype)
        record("rows of a chunk", rows, "rows", gpu=name, gradient=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--no-build", action="store_true", help="leave out the report of ptxas")
    args = parse(parser)
    if min(args.tokens, args.vocab, args.hidden) < 1:
        parser.error("--tokens, --vocab and --hidden must be at least 1")
    if not args.no_build:
        print(f"# Report of ptxas for {', '.join(ARCHITECTURES)}; one number where they agree")
        with tempfile.TemporaryDirectory() as folder:
            print_kernels(compiled(Path(folder)))
    print("# Row kernel, forward, bfloat16, T = 4096; computed")
    print_rows(4096)
    print("# The other kernels; computed. GAE is bound by latency, and the rest at most by memory.")
    print_streams()
    print(f"# LM head, T = {args.tokens}, V = {args.vocab}, H = {args.hidden}, bfloat16; operations per byte of the")
    print(f"# weight's gradient, and time over all logits at once; computed. At least {LEAST_ROWS} rows may be taken.")
    print_chunks(args.tokens, args.vocab, args.hidden)


if __name__ == "__main__":
    main()
