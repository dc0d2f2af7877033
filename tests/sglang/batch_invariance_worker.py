"""Prints what SGLang resolves for servers of a deterministic run on a mocked GPU, a line of JSON for each case.

Usage: batch_invariance_worker.py CHECKPOINT... The mock is that of docs/make_gpu_backends.py, which says what
it covers.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from megarl import cli

ROOT = Path(__file__).parents[2]
RUN = ["+experiment=gsm8k_grpo", "cluster.gpus_per_node=8", "server.device=cuda"]
SHOWN = (
    "enable_deterministic_inference", "attention_backend", "sampling_backend", "disable_radix_cache",
    "disable_custom_all_reduce", "enable_torch_symm_mem", "flashinfer_allreduce_fusion_backend", "moe_runner_backend",
)  # fmt: skip
NCCL = ("NCCL_ALGO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
spec = importlib.util.spec_from_file_location("make_gpu_backends", ROOT / "docs" / "make_gpu_backends.py")
assert spec is not None
assert spec.loader is not None
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)


def case(architecture: str, checkpoint: Path, deterministic: bool, tp: int) -> dict[str, Any]:
    """The resolved arguments, and the variables that SGLang sets for its ranks."""
    for name in NCCL:
        os.environ.pop(name, None)
    overrides = [f"deterministic={deterministic}", f"server.tp_size={tp}", "server.dtype=bfloat16"]
    if "deepseek" in checkpoint.name:
        overrides.append("+sglang.attention_backend=triton")
    config = cli.composed([*RUN, *overrides])
    with table.mocked_gpu(architecture):
        values = table.resolved(config, checkpoint).resolved_dict()
    told = {"architecture": architecture, "model": checkpoint.name, "deterministic": deterministic, "tp": tp}
    return told | {name: values[name] for name in SHOWN} | {name: os.environ.get(name) for name in NCCL}


def main() -> None:
    logging.disable(logging.WARNING)
    table.prepare()
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    print(json.dumps({"attention": choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES}), flush=True)
    for path in map(Path, sys.argv[1:]):
        for architecture in ("sm90", "sm100"):
            for deterministic, tp in ((True, 1), (True, 2), (False, 2)):
                print(json.dumps(case(architecture, path, deterministic, tp)), flush=True)


if __name__ == "__main__":
    main()
