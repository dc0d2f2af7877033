"""Lists installed and missing software and its benefit on this machine: python -m megarl.doctor

Exit code 1 if software that megarl needs here is missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from megarl.versions import GPUs, driver_cuda, gpus, version_of, versions

NEEDED, FASTER, OPTIONAL = "needed", "faster", "optional"
GIB = 2**30
CARDS = Path("/sys/class/infiniband")
USAGE = "usage: python -m megarl.doctor, which lists what is installed, what is missing and what it is for"
WIDTH = 120  # characters, where the output is no terminal


@dataclass(frozen=True)
class Part:
    """A package or device, with its benefit."""

    name: str
    detected: str | None  # its version, or "found"
    kind: str  # needed, faster (runs without it, more slowly) or optional
    brings: str
    remedy: str = ""

    @property
    def verdict(self) -> str:
        if self.detected is not None:
            return "ok"
        return {NEEDED: "MISSING", FASTER: "missing", OPTIONAL: "-"}[self.kind]


def machine(gpu: GPUs) -> str:
    """Describes this machine in a line."""
    memory = psutil.virtual_memory().total / GIB
    cores = len(os.sched_getaffinity(0))
    if not gpu.names:
        device = "no GPU"
    else:
        device = f"{len(gpu.names)} x {gpu.names[0]} of {min(gpu.memory_mib) / 1024:.0f} GiB, driver {gpu.driver}"
    return f"{platform.machine()}, {cores} core{'s' * (cores > 1)}, {memory:.0f} GiB; {device}"


def everywhere() -> list[Part]:
    """Software that megarl needs on any machine."""
    installed = versions()
    python = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    setup = "make setup, or docs/install_gpu.md"
    return [
        Part("Python", python if supported else None, NEEDED, "3.11 to 3.13", "make setup PYTHON=python3.12"),
        Part("torch", installed["torch"], NEEDED, "tensors, collectives", setup),
        Part("Megatron-core", installed["Megatron-core"], NEEDED, "the actor", setup),
        Part("transformers", installed["transformers"], NEEDED, "configs and tokenizers of checkpoints", setup),
        Part("kernels (megarl._C)", kernels(), NEEDED, "log-probs, advantages, losses", "make setup"),
        Part("SGLang", installed["SGLang"], NEEDED, "rollouts; SFT and preferences do without", setup),
    ]


def kernels() -> str | None:
    """Devices that megarl's own kernels were built for; None if they were not built."""
    try:
        from megarl.ops import native
    except ImportError:
        return None
    return "CPU and CUDA" if native.HAS_CUDA else "CPU"


def on_gpus() -> list[Part]:
    """Software for a machine with GPUs."""
    installed, requirements = versions(), "requirements/build_gpu_packages.sh"
    build = "MEGARL_CUDA=1 pip install --no-build-isolation --no-deps -e ."
    te = installed["Transformer Engine"]
    apex = "fused Adam and clipping, which Transformer Engine has too: nothing beside it"
    return [
        Part("torch on CUDA", _cuda_of_torch(), NEEDED, "anything on the GPU", "docs/install_gpu.md"),
        Part("driver", _driver(), NEEDED, "runs torch's CUDA version", "a newer NVIDIA driver"),
        Part("CUDA kernels", _kernels_here(), NEEDED, "megarl._C on these GPUs", build),
        Part("NCCL", installed["NCCL"], NEEDED, "collectives between GPUs", "it comes with torch's CUDA build"),
        Part("sglang-kernel", version_of("sglang-kernel"), NEEDED, "SGLang's own CUDA kernels", "docs/install_gpu.md"),
        Part(
            "flashinfer",
            version_of("flashinfer-python"),
            FASTER,
            "SGLang's attention and sampling",
            "docs/install_gpu.md",
        ),
        Part(
            "Transformer Engine", te, FASTER, "fused layers, attention that is never stored, fused Adam", requirements
        ),
        Part("flash-attn", installed["flash-attn"], FASTER, "attention for the former", requirements),
        Part("apex", installed["apex"], OPTIONAL if te else FASTER, apex, "docs/install_gpu.md"),
        Part("nvcc", _program("nvcc"), NEEDED, "compiles SGLang's kernels", "the CUDA 13 toolkit"),
    ]


def _cuda_of_torch() -> str | None:
    """CUDA version of torch's build, if it finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else None


def _driver() -> str | None:
    """Newest CUDA version that the driver runs, if torch's build needs no newer one."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    version, built = driver_cuda(), torch.version.cuda
    if version is None or (built is not None and version[0] < int(built.partition(".")[0])):
        return None
    return f"CUDA {version[0]}.{version[1]}"


def _kernels_here() -> str | None:
    """Architectures of the CUDA kernels, if all GPUs here are among them."""
    if kernels() != "CPU and CUDA" or _cuda_of_torch() is None:
        return None
    import torch

    from megarl.ops import native

    here = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return ", ".join(native.CUDA_ARCHITECTURES) if all(map(native.runs_on, here)) else None


def on_clusters() -> list[Part]:
    """Software and hardware for runs on several machines."""
    network = _network()
    shared = f"{shutil.disk_usage('/dev/shm').total / GIB:.0f} GiB" if Path("/dev/shm").is_dir() else None
    return [
        Part("Slurm", _program("sbatch"), OPTIONAL, "launcher=slurm, sbatch slurm/grpo_70b.sh", "of the cluster"),
        Part("Ray", versions()["Ray"], OPTIONAL, "launcher=ray", "pip install ray"),
        Part(
            "InfiniBand, RoCE",
            network,
            FASTER if any(CARDS.glob("*")) else OPTIONAL,
            "collectives past the CPU; without it NCCL goes over TCP",
            "apt-get install libibverbs1 ibverbs-providers",
        ),
        Part("/dev/shm", shared, OPTIONAL, "reshard.transport=shm; in a container --ipc=host", "mount it"),
    ]


def _network() -> str | None:
    """The cards' names, if NCCL can load the library by which it finds them."""
    cards = sorted(path.name for path in CARDS.glob("*"))
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return None
    return ", ".join(cards) or None


def _program(name: str) -> str | None:
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    return str(Path(path).parent) if path else None


def command() -> int:
    """Prints the table and the remedies. Returns the exit code."""
    console = Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", WIDTH)))
    gpu = gpus()
    groups = {"Everywhere": everywhere(), "On clusters": on_clusters()}
    if gpu.names:
        groups = {"Everywhere": groups["Everywhere"], "On GPUs": on_gpus(), "On clusters": groups["On clusters"]}
    table = Table(title=f"megarl here: {machine(gpu)}", title_justify="left", title_style="bold")
    for name in ("", "", "found", "what it brings"):
        table.add_column(name, no_wrap=name != "what it brings")
    for parts in groups.values():
        table.add_section()
        for part in parts:
            table.add_row(part.verdict, part.name, part.detected or "-", part.brings)
    console.print(table)
    everything = [part for parts in groups.values() for part in parts]
    missing = [part for part in everything if part.verdict == "MISSING"]
    slower = [part for part in everything if part.verdict == "missing"]
    for part in missing:
        print(f"MISSING  {part.name}: {part.brings}; {part.remedy}")
    for part in slower:
        print(f"faster   with {part.name}: {part.brings}; {part.remedy}")
    if not gpu.names:
        print("note     no GPU: everything runs on the CPU, for models that fit it; docs/install_gpu.md is for GPUs")
    print("nothing that is needed is missing" if not missing else f"{len(missing)} needed, and missing")
    return 1 if missing else 0


def main(arguments: list[str]) -> int:
    """Runs the command, which takes no arguments but `--help`."""
    if not arguments:
        return command()
    is_help = arguments[0] in ("-h", "--help")
    print(USAGE if is_help else f"megarl: {arguments[0]} is no argument of this command; {USAGE}")
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
