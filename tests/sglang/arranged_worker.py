"""SGLang's own quantised layers, arranged as on GPUs, and syncs into them; prints a line of JSON.

Run with `python arranged_worker.py PORT CHECKPOINT OTHER`, two quantised checkpoints of one model. SGLang's loader and
its `process_weights_after_loading` run as they are. Only the CUDA kernel that permutes codes is replaced, by SGLang's
own function to test it (`sglang.test.test_marlin_utils`). Products need a GPU and do not run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from megarl.cpu import sglang_launch

sglang_launch.install()
PORT, CHECKPOINT, OTHER = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0"

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.layers.quantization.compressed_tensors.schemes import (  # noqa: E402
    CompressedTensorsW8A8Fp8,
    CompressedTensorsWNA16,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as wna16  # noqa: E402
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater  # noqa: E402
from sglang.srt.model_loader import get_model  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.test.test_marlin_utils import get_weight_perm, marlin_weights  # noqa: E402

ARRANGED = (CompressedTensorsWNA16, CompressedTensorsW8A8Fp8)
process = [kind.process_weights_after_loading for kind in ARRANGED]
from megarl.cpu.sglang_models import quantised as _  # noqa: E402, F401
from megarl.families.weight_formats import format_of  # noqa: E402
from megarl.ops.digest import digest  # noqa: E402
from megarl.reshard.plan.sglang_layout import Geometry  # noqa: E402
from megarl.reshard.sync.live_parameters import check_plain, live_fragments  # noqa: E402
from megarl.reshard.sync.marlin_weights import MarlinWeights  # noqa: E402
from megarl.rollout.servers import guarded_launch  # noqa: E402


def repack(words: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: object) -> torch.Tensor:
    """`gptq_marlin_repack` in Python: codes int32 `[size_k / 8, size_n]`, the first of 8 in the lowest bits."""
    assert perm.numel() == 0
    codes = torch.stack([words >> 4 * place & 15 for place in range(8)], dim=1).view(size_k, size_n)
    return marlin_weights(codes, size_k, size_n, 4, get_weight_perm(4))  # num_bits is of CUDA alone


for kind, own in zip(ARRANGED, process, strict=True):
    kind.process_weights_after_loading = own
guarded_launch.keep_arrangement(WeightUpdater)
wna16.gptq_marlin_repack = repack
wna16.marlin_make_workspace = lambda device: torch.zeros(1, dtype=torch.int32)


def load(checkpoint: str) -> torch.nn.Module:
    args = ServerArgs(model_path=checkpoint, device="cpu", dtype="bfloat16", disable_cuda_graph=True)
    args.resolve_once()
    if not torch.distributed.is_initialized():
        ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=PORT)
    return get_model(
        model_config=ModelConfig.from_server_args(args), load_config=LoadConfig(), device_config=DeviceConfig("cpu")
    )


def digests(model: torch.nn.Module) -> dict[str, str]:
    named = {name: p for name, p in model.named_parameters() if p.numel() and not name.endswith("weight_shape")}
    return {name: digest(parameter.contiguous()) for name, parameter in named.items()}


def sync(model: torch.nn.Module, checkpoint: str, settle: bool = True) -> list[str]:
    """Writes a checkpoint's tensors into the fragments, as a sync does. Returns the parts that read back otherwise."""
    updater = SimpleNamespace(get_model=lambda: model, device="cpu")
    WeightUpdater.begin_weight_update(updater)
    check_plain(model)
    arrangement = MarlinWeights(model)
    geometry = Geometry.of(model.config, 0, 1, 1, format_of(model.config))
    fragments = list(live_fragments(arrangement.plain(model.named_parameters()), geometry))
    arrangement.close()
    tensors = load_file(Path(checkpoint, "model.safetensors"))
    arrangement.open()
    for fragment in fragments:
        fragment.view.copy_(fragment.box.of(tensors[fragment.box.name]))
    if settle:
        arrangement.settle()
    found = [(f.box, f.view.clone()) for f in fragments]
    arrangement.close()
    WeightUpdater.end_weight_update(updater, run_post_load=False)
    plain = [tensor for layer in arrangement.layers.values() for tensor in (layer.codes, layer.scales)]
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in plain), "copies have memory during a sync alone"
    return [str(box) for box, view in found if not torch.equal(view, box.of(tensors[box.name]).to(view.dtype))]


first, other = load(CHECKPOINT), load(OTHER)
addresses = {name: p.data_ptr() for name, p in first.named_parameters()}
before, expected = digests(first), digests(other)
unread = sync(first, OTHER, settle=False)
arranged = [p.shape for n, p in first.named_parameters() if n.endswith(("down_proj.weight_packed", "down_proj.weight"))]
left = digests(first)
wrong = sync(first, OTHER)
print(
    json.dumps(
        {
            "copied": len(MarlinWeights(first).layers),
            "arranged": [list(shape) for shape in arranged],
            "changed": sorted(name for name in before if before[name] != expected[name]),
            "quantised_before_settling": sorted(n for n in left if "proj" in n and left[n] != before[n]),
            "unread": unread,
            "wrong": wrong,
            "differing": sorted(name for name in expected if digests(first)[name] != expected[name]),
            "moved": sorted(name for name, p in first.named_parameters() if p.data_ptr() != addresses[name]),
        }
    )
)
