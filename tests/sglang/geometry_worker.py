"""One rank of SGLang, model classes only: loads checkpoints with SGLang's own loader and compares them with the rules.

Usage: geometry_worker.py RANK TP_SIZE EP_SIZE PORT PADDED CHECKPOINT...

For each checkpoint it prints a line of JSON with the comparison.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from megarl.cpu import sglang_launch

sglang_launch.install()
RANK, TP_SIZE, EP_SIZE, PORT, PADDED = (int(value) for value in sys.argv[1:6])
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(TP_SIZE))

import torch  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.model_loader import get_model  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from megarl.actor.weights.hf_files import Checkpoint  # noqa: E402
from megarl.actor.weights.shards import tensor_shapes  # noqa: E402
from megarl.families import load_config  # noqa: E402
from megarl.reshard.plan.sglang_layout import Geometry, padded_for_cpu  # noqa: E402
from megarl.reshard.sync.live_parameters import check_plain, live_fragments  # noqa: E402

# Operations of SGLang's CPU kernels that models/qwen3_5.py:284 looks up when it is imported. No forward pass runs here.
for operation in ("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate"):
    setattr(torch.ops.sgl_kernel, f"{operation}_cpu", None)
torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu = None


def arguments(checkpoint: str) -> ServerArgs:
    args = ServerArgs(
        model_path=checkpoint,
        device="cpu",
        dtype="float32",
        tp_size=TP_SIZE,
        ep_size=EP_SIZE,
        disable_cuda_graph=True,
        mamba_radix_cache_strategy="no_buffer",  # of gated delta nets; others need a GPU
        disable_overlap_schedule=True,  # as that asks
    )
    args.resolve_once()
    return args


def start(args: ServerArgs) -> None:
    ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=RANK, pp_rank=0), gpu_id=RANK)
    publish(args, role="scheduler", ranks=ranks)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=PORT)


def compare(checkpoint: str) -> dict[str, Any]:
    """Differences between the rules and the parameters that SGLang's loader filled from the checkpoint."""
    model_config = ModelConfig.from_server_args(arguments(checkpoint))
    if PADDED:
        model_config = adjust_config_with_unaligned_cpu_tp(model_config, LoadConfig(), TP_SIZE)
    model = get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    check_plain(model)
    hf = load_config(Path(checkpoint))
    rules = Geometry.of(padded_for_cpu(hf, TP_SIZE) if PADDED else hf, RANK, TP_SIZE, EP_SIZE)
    live = Geometry.of(model.config, RANK, TP_SIZE, EP_SIZE)
    stored = Checkpoint(checkpoint, hf)
    checkpoint_tensors = {
        name: stored.read(name, shape, tuple(slice(0, size) for size in shape))
        for name, shape in tensor_shapes(hf).items()
    }
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fragments = list(live_fragments(model.named_parameters(), rules))
    wrong = [
        str(f.box)
        for f in fragments
        if not torch.equal(f.view, f.box.of(checkpoint_tensors[f.box.name]).to(f.view.dtype))
    ]
    held = {fragment.tensor for fragment in fragments}  # all but what training leaves alone
    for name, parameter in model.named_parameters():
        if name in held:
            parameter.detach().zero_()
    for fragment in fragments:
        fragment.view.copy_(fragment.box.of(checkpoint_tensors[fragment.box.name]))
    return {
        "checkpoint": Path(checkpoint).name,
        "model": type(model).__name__,
        "geometry": "equal" if rules == live else f"{rules} by rule, {live} live",
        "fragments": len(fragments),
        "wrong": wrong,
        "refilled": [n for n, p in model.named_parameters() if n in held and not torch.equal(p, loaded[n])],
        "names": sorted({f.box.name for f in fragments}),
        "elements": sum(p.numel() for p in loaded.values()),
        "held": sum(f.view.numel() for f in fragments),
    }


def main() -> None:
    logging.disable(logging.WARNING)
    start(arguments(sys.argv[6]))
    for checkpoint in sys.argv[6:]:
        print(json.dumps(compare(checkpoint)), flush=True)


if __name__ == "__main__":
    main()
