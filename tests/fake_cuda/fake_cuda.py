"""A CUDA device in host memory, for a torch without CUDA.

`load()` comes before `import torch`. Tensors of device "cuda" are then real tensors of torch: their types, autograd,
views and storages are those of a GPU, and the CPU's kernels compute them (`host_memory_device.cpp`). `watch.py` refuses
what a GPU refuses, and notes what makes the host wait.

Covered: the devices and dtypes of every operation, megarl's operators with their checks, Megatron's branches for GPUs,
each wait of the host, with the line that asked for it, and the order between streams (`streams.py`). Not covered:
kernels that exist for CUDA alone (the CPU's run), NCCL (gloo carries collectives), the allocator's rounding, and speed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import streams

SOURCE = Path(__file__).with_name("host_memory_device.cpp")
TORCH = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]


def build(folder: Path) -> Path:
    """Compiles the device's library into `folder`. About 10 s."""
    library = folder / "host_memory_device.so"
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", "-O0", *includes, str(SOURCE)]
    subprocess.run([*command, "-o", str(library), *libraries], check=True, timeout=600)
    return library


def load(library: Path) -> None:
    """Loads the device into this process, which must not have imported torch."""
    assert "torch" not in sys.modules, "torch has looked for its devices already"
    for path in (TORCH / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    _answer_for_torch_cuda()


def _answer_for_torch_cuda() -> None:
    """Gives `torch.cuda` the answers of a machine with one GPU."""
    import torch

    generator = torch.Generator()
    properties = SimpleNamespace(  # clocks in kHz and bus width in bits are an H100 SXM's
        name="host memory",
        major=9,
        minor=0,
        total_memory=80 * 2**30,
        uuid="GPU-0",
        multi_processor_count=132,
        clock_rate=1_980_000,
        memory_clock_rate=2_619_000,
        memory_bus_width=5120,
    )
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (2**30, 80 * 2**30),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: streams.note("synchronize"),
        "current_stream": streams.current,
        "default_stream": lambda *_: streams.DEFAULT,
        "stream": streams.using,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "empty_cache": lambda: None,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "default_generators": (generator,),
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random):
            if hasattr(module, name):
                setattr(module, name, answer)

    resize_on_host = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize_on_host(storage, size)
        torch.ops.fake_cuda.resize(storage, size)
        return storage

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
