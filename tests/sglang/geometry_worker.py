"""One rank of SGLang, model classes only: loads checkpoints with SGLang's own loader and compares them with the rules.

Usage: -m tests.sglang.geometry_worker PARENT_PID RANK TP_SIZE EP_SIZE PORT PADDED CHECKPOINT...

For each checkpoint it prints a line of JSON with the comparison.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megarl.cpu import sglang_launch

sglang_launch.install()
RANK, TP_SIZE, EP_SIZE, PORT, PADDED = (int(value) for value in sys.argv[2:7])
CHECKPOINTS = sys.argv[7:]

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.lora import layers  # noqa: E402
from sglang.srt.lora.lora_manager import LoRAManager  # noqa: E402
from sglang.srt.lora.lora_registry import LoRARef  # noqa: E402
from sglang.srt.model_loader import get_model  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from megarl.actor.weights.hf_files import Checkpoint  # noqa: E402
from megarl.actor.weights.shards import tensor_shapes  # noqa: E402
from megarl.cpu.sglang_models import adapters as _  # noqa: E402, F401
from megarl.cpu.sglang_models import quantised as __  # noqa: E402, F401
from megarl.families import load_config, with_adapters  # noqa: E402
from megarl.families.adapters import LORA_A, MANAGER, SERVED, Adapters  # noqa: E402
from megarl.families.weight_formats import format_of  # noqa: E402
from megarl.ops.digest import digest  # noqa: E402
from megarl.reshard.plan.sglang_adapters import HELD, adapter_buffers  # noqa: E402
from megarl.reshard.plan.sglang_layout import Geometry, padded_for_cpu  # noqa: E402
from megarl.reshard.sync.live_adapters import live_adapters  # noqa: E402
from megarl.reshard.sync.live_parameters import check_plain, complete, live_fragments, unsent_parameters  # noqa: E402

# Operations of SGLang's CPU kernels that models/qwen3_5.py:284 looks up when it is imported. No forward pass runs here.
for operation in ("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate"):
    setattr(torch.ops.sgl_kernel, f"{operation}_cpu", None)
torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu = None


def arguments(checkpoint: str, **more: Any) -> ServerArgs:
    args = ServerArgs(
        model_path=checkpoint,
        device="cpu",
        dtype="float32",
        tp_size=TP_SIZE,
        ep_size=EP_SIZE,
        disable_cuda_graph=True,
        mamba_radix_cache_strategy="no_buffer",  # of gated delta nets; others need a GPU
        disable_overlap_schedule=True,  # as that asks
        **more,
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
    format = format_of(hf)
    rules = Geometry.of(padded_for_cpu(hf, TP_SIZE) if PADDED else hf, RANK, TP_SIZE, EP_SIZE, format)
    live = Geometry.of(model.config, RANK, TP_SIZE, EP_SIZE, format_of(model.config))
    if format is None:
        stored = Checkpoint(checkpoint, hf)
        shapes = tensor_shapes(hf).items()
        checkpoint_tensors = {n: stored.read(n, shape, tuple(slice(0, size) for size in shape)) for n, shape in shapes}
    else:
        checkpoint_tensors = load_file(Path(checkpoint, "model.safetensors"))
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fragments = list(live_fragments(model.named_parameters(), rules))
    wrong = [
        str(f.box)
        for f in fragments
        if digest(f.view) != digest(f.box.of(checkpoint_tensors[f.box.name]).to(f.view.dtype))
    ]
    held = {fragment.tensor for fragment in fragments}  # all but what training leaves alone
    for name, parameter in model.named_parameters():
        if name in held:
            parameter.detach().zero_()
    derived = {n: b for n, b in model.named_buffers() if n.endswith(".gemma_weight")}  # read on GPUs
    derived |= {n: p.detach() for n, p in model.named_parameters() if n in {r.name for r in rules.parameters()} - held}
    kept = {name: tensor.clone() for name, tensor in derived.items()}
    for tensor in derived.values():
        tensor.fill_(torch.nan)
    for fragment in fragments:
        fragment.view.copy_(fragment.box.of(checkpoint_tensors[fragment.box.name]))
    complete(model, unsent_parameters(rules))
    refilled = [n for n, p in model.named_parameters() if n in held and digest(p) != digest(loaded[n])]
    refilled += [name for name, tensor in derived.items() if not torch.equal(tensor, kept[name])]
    adapters: list[str] = []
    if hf.model_type in HELD and format is None:
        adapters = compare_adapters(model, hf, arguments(checkpoint))
        wrapped = [f.box for f in live_fragments(model.named_parameters(), rules)]
        assert wrapped == [f.box for f in fragments], "SGLang's wrappers of layers keep the names of weights"
        adapters += [text for size in (2, 4) if TP_SIZE == 1 for text in sliced(hf, size)]
    return {
        "checkpoint": Path(checkpoint).name,
        "model": type(model).__name__,
        "geometry": "equal" if rules == live else f"{rules} by rule, {live} live",
        "fragments": len(fragments),
        "wrong": wrong,
        "refilled": refilled,
        "adapters": adapters,
        "derived": sorted({name.rpartition(".")[2] for name in derived}),
        "names": sorted({f.box.name for f in fragments}),
        "elements": sum(p.numel() for p in loaded.values()),
        "held": sum(f.view.numel() for f in fragments),
    }


LORA = Adapters(4, ("all-linear",), 6.0)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapters(hf: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = tensor_shapes(with_adapters(hf, LORA))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compare_adapters(model: Any, hf: Any, args: ServerArgs) -> list[str]:
    """Differences between SGLang's own loading of a random adapter into its pool, and the views by the rules.

    Wraps the model's layers. With padded heads SGLang loads none, and the rules' shapes alone are compared.
    """
    manager = LoRAManager(
        base_model=model,
        base_hf_config=model.config,
        max_loras_per_batch=2,
        load_config=LoadConfig(),
        dtype=torch.float32,
        server_args=args,
        lora_backend="torch_native",
        max_lora_rank=LORA.rank,
        target_modules=set(LINEAR),
    )
    ref = LoRARef(lora_name=SERVED, lora_path="", pinned=True)
    tensors = random_adapters(hf)
    document = {"peft_type": "LORA", "r": LORA.rank, "lora_alpha": LORA.alpha, "target_modules": list(LINEAR)}
    padded = model.config.num_attention_heads != hf.num_attention_heads or (
        model.config.intermediate_size != hf.intermediate_size
    )
    named = {} if padded else {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    result = manager.load_lora_adapter_from_tensors(ref, named, document)
    assert result.success, result.error_message
    manager.fetch_new_loras({None, ref.lora_id})
    setattr(model, MANAGER, manager)
    pool = manager.memory_pool
    slot = pool.uid_to_buffer_id[ref.lora_id]
    buffers = {
        f"{module} {kind} of layer {number}": buffer[slot]
        for kind, buffers in (("A", pool.A_buffer), ("B", pool.B_buffer))
        for module, layers_ in buffers.items()
        for number, buffer in enumerate(layers_)
    }
    loaded = {name: buffer.clone() for name, buffer in buffers.items()}
    for fragment in live_adapters(model, Geometry.of(model.config, RANK, TP_SIZE, EP_SIZE)):
        fragment.view.copy_(fragment.box.of(tensors[fragment.box.name]))
    return [name for name, buffer in buffers.items() if not padded and not torch.equal(buffer, loaded[name])]


def sliced(hf: Any, tp_size: int) -> list[str]:
    """Differences between the rules and SGLang's own slices of a random adapter, for every rank of a group of
    `tp_size`, without its processes."""
    tensors, wrong = random_adapters(hf), []
    for rank in range(tp_size):
        geometry = Geometry.of(hf, rank, tp_size)
        for rule in adapter_buffers(geometry, LORA):
            held = torch.zeros(rule.shape)
            for part in rule.parts:
                rows, columns = (slice(a, a + n) for a, n in zip(part.at, part.box.shape, strict=True))
                held[rows, columns] = part.box.of(tensors[part.box.name])
            with mock.patch.object(layers, "get_group_rank_size", lambda group, rank=rank: (rank, tp_size)):
                sglangs = sglang_slice(geometry, rule.name, tensors)
            if not torch.equal(held, sglangs):
                wrong.append(f"{rule.name} on rank {rank} of {tp_size}")
    return wrong


def sglang_slice(geometry: Geometry, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What SGLang would load of a module's A or B, by the slicing of its layer class."""
    module, kind = name.split(".lora_")
    prefix, leaf = module.rsplit(".", 1)
    parts = {"qkv_proj": LINEAR[:3], "gate_up_proj": LINEAR[4:6]}.get(leaf, (leaf,))
    whole = torch.cat([tensors[f"{prefix}.{part}.lora_{kind}"] for part in parts])
    heads, tp = geometry.model.layers[0].attention, geometry.rank.tp_size
    rows = [tensors[f"{prefix}.{part}.lora_B.weight"].shape[0] for part in parts]
    columns = whole.shape[1]
    base = SimpleNamespace(
        tp_group=None,
        kv_tp_group=None,
        input_size_per_partition=columns // tp,
        output_sizes=rows,
        output_partition_sizes=[size // tp for size in rows],
        q_proj_shard_size=heads.heads * heads.head_dim // tp,
        kv_proj_shard_size=max(1, heads.kv_heads // tp) * heads.head_dim,
        num_kv_head_replicas=max(1, tp // heads.kv_heads),
        total_num_heads=heads.heads,
        total_num_kv_heads=heads.kv_heads,
        head_size=heads.head_dim,
    )
    kinds = {"qkv_proj": layers.QKVParallelLinearWithLoRA, "gate_up_proj": layers.MergedColumnParallelLinearWithLoRA}
    layer = kinds.get(leaf, layers.RowParallelLinearWithLoRA)
    cut = layer.slice_lora_a_weights if name.endswith(LORA_A) else layer.slice_lora_b_weights
    return cut(SimpleNamespace(base_layer=base), whole)


def main() -> None:
    logging.disable(logging.WARNING)
    start(arguments(CHECKPOINTS[0]))
    for checkpoint in CHECKPOINTS:
        print(json.dumps(compare(checkpoint)), flush=True)


if __name__ == "__main__":
    main()
