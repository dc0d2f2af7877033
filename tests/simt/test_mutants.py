"""Plants faults in the CUDA kernels, one at a time: a named case of tests/gpu must notice each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import test_kernels_on_device as cases
import torch
from devices import EmulatedDevice
from simt_build import ROOT, Kernels, linked, loaded, lock


@dataclass(frozen=True)
class Mutant:
    """A fault in one file, the kernels that are compiled with it, and the case that notices it by an error."""

    name: str
    file: str
    original: str
    mutated: str
    compiled: str
    case: str
    arguments: tuple[Any, ...]
    error: str


GAE = ("test_gae_moments_and_whitening_match_the_cpu", (0.4,))
LOSS = ("test_the_policy_loss_matches_the_cpu", ("token", "clip", "none", "none"))
ROWS = ("test_log_probs_and_gradients_match_the_oracle", (507, torch.float32, 3, 5))
FILL = ("test_row_kernels_fill_their_outputs_and_write_nothing_else", (torch.float32,))
ORDER, VALUE = "depends on the order of threads", "not close"

CUDA, ADVANTAGE, LOGPROB = "csrc/common/cuda.cuh", "csrc/advantage/cuda.cu", "csrc/logprob/cuda.cu"
LOSS_KERNELS = "csrc/loss/cuda.cu"
MUTANTS = (
    Mutant(
        "block_reduce loses the barrier before thread 0 reads of_warp",
        CUDA,
        "of_warp[threadIdx.x / kWarp] = v;\n  __syncthreads();",
        "of_warp[threadIdx.x / kWarp] = v;",
        *(LOSS_KERNELS, *LOSS, ORDER),
    ),
    Mutant(
        "block_scan loses the barrier before the next call overwrites of_warp",
        ADVANTAGE,
        "  __syncthreads();  // the next call may overwrite of_warp\n",
        "",
        *(ADVANTAGE, *GAE, ORDER),
    ),
    Mutant(
        "one warp's sum is never written",
        CUDA,
        "if (threadIdx.x % kWarp == 0) of_warp",
        "if (threadIdx.x % kWarp == 0 && threadIdx.x < kThreads - kWarp) of_warp",
        *(LOSS_KERNELS, *LOSS, ORDER),
    ),
    Mutant(
        "one sum more than there are warps is read",
        CUDA,
        "w < kWarps; ++w) v = combine",
        "w <= kWarps; ++w) v = combine",
        *(LOSS_KERNELS, *LOSS, VALUE),
    ),
    Mutant(
        "only a part of the block meets at the barrier",
        CUDA,
        "= v;\n  __syncthreads();",
        "= v;\n  if (threadIdx.x < 128) __syncthreads();",
        *(LOSS_KERNELS, *LOSS, r"divergent barrier in kernel .*policy_loss_kernel.* missing, because .*: 128-255"),
    ),
    Mutant(
        "the mask of all lanes lacks the last",
        CUDA,
        "kAllLanes = 0xffffffffu",
        "kAllLanes = 0x7fffffffu",
        *(LOSS_KERNELS, *LOSS, r"a lane that its mask does not name.*thread \(31"),
    ),
    Mutant(
        "the scan shifts by two lanes",
        ADVANTAGE,
        "&inclusive)[i], 1);",
        "&inclusive)[i], 2);",
        *(ADVANTAGE, *GAE, VALUE),
    ),
    Mutant(
        "the first lane, not the last, gives its warp's map",
        ADVANTAGE,
        "if (lane == kWarp - 1) of_warp",
        "if (lane == 0) of_warp",
        *(ADVANTAGE, *GAE, VALUE),
    ),
    Mutant(
        "the scan merges in swapped order",
        ADVANTAGE,
        "return compose(earlier, later); }",
        "return compose(later, earlier); }",
        *(ADVANTAGE, *GAE, VALUE),
    ),
    Mutant(
        "compose loses its term in q",
        "csrc/common/advantage_math.h",
        " + earlier.q * known",
        "",
        *(ADVANTAGE, *GAE, VALUE),
    ),
    Mutant(
        "the state is not carried to the next 1,024 tokens",
        ADVANTAGE,
        "    carry = apply(total, carry);\n",
        "",
        *(ADVANTAGE, *GAE, VALUE),
    ),
    Mutant(
        "a row's load reads one column too many",
        LOGPROB,
        "g.set(i, c + i < valid ?",
        "g.set(i, c + i <= valid ?",
        *(LOGPROB, *ROWS, "Not equal to tolerance"),
    ),
    Mutant(
        "a row's store writes one column too many",
        LOGPROB,
        "if (c + i < columns) row",
        "if (c + i <= columns) row",
        *(LOGPROB, *FILL, "isnan"),
    ),
)
COMPILATIONS = 2  # beside each other; a test machine has two cores

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    """Compiles the one `.cu` file that each mutant touches, and links it with the other objects unchanged."""
    kernels = Kernels(ROOT / "csrc")

    def build(mutant: Mutant) -> Path:
        text = kernels.texts[mutant.file]
        assert text.count(mutant.original) == 1, f"{mutant.name}: {mutant.file} has changed; adapt the mutant"
        changed = Kernels(ROOT / "csrc", {mutant.file: text.replace(mutant.original, mutant.mutated)})
        return linked([changed.object_of(n) if n == mutant.compiled else o for n, o in objects.items()])

    with lock():
        objects = kernels.compiled()
        with ThreadPoolExecutor(COMPILATIONS) as pool:
            return dict(zip([m.name for m in MUTANTS], pool.map(build, MUTANTS), strict=True))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_case_notices_that(modules, mutant):
    torch.manual_seed(0)
    case = getattr(cases, mutant.case)
    with pytest.raises((AssertionError, RuntimeError), match=mutant.error):
        case(EmulatedDevice(loaded(modules[mutant.name])), *mutant.arguments)
