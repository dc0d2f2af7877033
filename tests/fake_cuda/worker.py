"""Runs cases on the device: `python worker.py LIBRARY FOLDER`, with a case as a line of JSON on its standard input.

A case is a list of function, arguments and layout. Its ranks are forked from this process, which has imported all; the
result of rank 0, or the traceback of the first rank that failed, is a line of the output.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import fake_cuda

fake_cuda.load(Path(sys.argv[1]))

import cases  # noqa: E402
import head  # noqa: E402
import torch  # noqa: E402
import transfers  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from watch import WATCH  # noqa: E402

from megarl.ops import advantage, digest, logprob_kernels, loss, native  # noqa: E402
from megarl.parallel import platform  # noqa: E402
from megarl.parallel.config import ParallelConfig  # noqa: E402
from tests.te import flash_twin  # noqa: E402


def prepare() -> None:
    """Has gloo carry collectives, and the CPU's kernels take the device's memory. Flash attention has a twin."""
    torch.set_num_threads(1)
    flash_twin.register()
    platform.collective_backend = lambda: "gloo"
    distributed_c10d._get_object_coll_device = lambda _=None: "cuda"  # as for NCCL's groups
    for module in (native, advantage, logprob_kernels, loss):
        module.where = lambda tensor: native._C.Where(False, 0, 1)  # type: ignore[attr-defined]
    digest.leaves_on_gpu = leaves_in_host_memory


def leaves_in_host_memory(data: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """Stands for the kernel of `csrc/digest`, which has no side for the CPU; the library hashes the same memory."""
    memory = bytearray(ctypes.string_at(data.data_ptr(), data.nbytes))
    if places is None:
        hashes = digest.leaves_on_cpu(torch.frombuffer(memory, dtype=torch.uint8))
    else:
        numbers = bytearray(ctypes.string_at(places.data_ptr(), places.nbytes))
        begins, ends = torch.frombuffer(numbers, dtype=torch.int64).view(2, -1).tolist()
        leaves = [memory[begin : min(begin + digest.LEAF_BYTES, end)] for begin, end in zip(begins, ends, strict=True)]
        hashes = b"".join(digest.leaves_on_cpu(torch.frombuffer(leaf, dtype=torch.uint8)) for leaf in leaves)
    leaves = torch.empty(len(hashes) // 16, 16, dtype=torch.uint8, device=data.device)
    ctypes.memmove(leaves.data_ptr(), hashes, len(hashes))
    return leaves


def run(name: str, arguments: dict[str, Any], layout: dict[str, int]) -> dict[str, Any]:
    """Runs one rank's part of a case."""
    function = next(getattr(module, name) for module in (cases, transfers, head) if hasattr(module, name))
    if layout:
        arguments = {**arguments, "layout": ParallelConfig(**layout)}
    try:
        with WATCH:
            return {"result": function(**arguments)}
    except Exception:
        return {"error": traceback.format_exc()}


def fork(case: tuple[str, dict[str, Any], dict[str, int]], folder: Path) -> dict[str, Any]:
    """Runs a case on all ranks of its layout, each in a process of its own."""
    world = ParallelConfig(**case[2]).world_size() if case[2] else 1
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            if world > 1:
                place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MEGARL_RENDEZVOUS": folder / "store"}
                os.environ.update({name: str(value) for name, value in place.items()})
            (folder / f"{rank}.json").write_text(json.dumps(run(*case)))
            sys.stderr.flush()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if len(results) < world:
        return {"error": f"{world - len(results)} of {world} ranks ended without a word"}
    return next((result for result in results if "error" in result), results[0])


if __name__ == "__main__":
    prepare()
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(dir=sys.argv[2]) as folder:
            print(json.dumps(fork(tuple(json.loads(line)), Path(folder))), flush=True)
