"""Arguments and environment of an SGLang server on CPU. Imports neither torch nor SGLang: servers start with it."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

PREPARE_MODULE = "megarl.cpu.sglang_launch"  # its `prepare` runs before SGLang is imported
LONGEST_PROMPT = 256  # new tokens of a sequence for `fused_step`; beyond, SGLang's own attention is faster
SEVERAL_STEPS = "SEVERAL_STEPS"  # name of `sglang_models/several_steps.py` among SGLang's algorithms
# Number of summands of row-parallel products, for servers that take `sglang_models/deterministic.py`; "" for others.
DETERMINISTIC = "MEGARL_DETERMINISTIC"


def arguments(tp_size: int, deterministic: bool, given: Collection[str]) -> dict[str, Any]:
    """ServerArgs of a server on CPU; `given` are the names of those that the user set."""
    chosen: dict[str, Any] = {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "sleep_on_idle": True,  # otherwise an idle server burns a core
    }
    with_adapters = any("lora" in name for name in given)
    if with_adapters:
        chosen["lora_backend"] = "torch_native"  # the others are for GPUs
    plain = not any("speculative" in name or name == "enable_return_routed_experts" for name in given)
    if tp_size == 1 and not deterministic and not with_adapters and plain:
        chosen["speculative_algorithm"] = SEVERAL_STEPS
        chosen["speculative_num_draft_tokens"] = 4  # SGLang reserves twice as many slots: room for 8 steps
        chosen["disable_overlap_schedule"] = True
    return chosen


def environment(scratch: str, tp_size: int, threads: int, deterministic: int) -> dict[str, str]:
    """Environment variables of a server on CPU; `scratch` is a folder of its own, `threads` OpenMP threads a rank.

    `deterministic` is the number of the run's summands, `Config.determinism.summands`.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        # Ranks meet by a file and talk over the loopback device: torch's TCP store listens on every address.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
        "GLOO_SOCKET_IFNAME": "lo",
        DETERMINISTIC: str(deterministic or ""),
    }
    if tp_size > 1:  # SGLang binds each rank to cores, and otherwise refuses more ranks than NUMA nodes
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
    return variables
