"""Runs the backends `te` and `torch` on the same batch, with the stand-in of Transformer Engine on `sys.path`.

Arguments: the work folder, and the cases by number of ranks as JSON {"1": [case, ...], "2": [...]}. A case has `name`,
`model`, `layout`, `recompute`, `dtype`, `experts` (their knobs under `te`), `marks`: if the norm is also computed under
other marks of experts, and `shared`: then `te` reads common beginnings once, and `torch` reads them in each sequence.
`offload` is a number of layers, `lora` the folder of the adapters that are trained, "" without, and `targets` theirs.
Ranks are forked from this process, which has imported Megatron once.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformer_engine.pytorch import GroupedLinear, cpu_offload
from transformer_engine.pytorch.cpu_offload import Layers

from megarl.actor import checks
from megarl.actor import engine as engine_module
from megarl.actor.batch import shared_prefix
from megarl.actor.checkpoint.stored_state import StoredState
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model.attention import delta_net
from megarl.parallel import groups, platform
from megarl.parallel.config import ParallelConfig
from megarl.types import PackedBatch
from tests.distributed.layout_worker import ADAM, gather_gradients, logits_loss_fn, loss_fn, loss_weight_fn
from tests.te import flash_twin

WORLD_LIMIT_S = 2400  # of the cases of one number of ranks; for a hang alone
NORMS = ("grad_norm", "mtp_grad_norm", "mtp_loss")


def adapters_of(model: Path, case: dict[str, Any]) -> LoraConfig:
    path = str(model.parent / case["lora"])
    return LoraConfig(rank=4, alpha=6.0, path=path, targets=case["targets"], quantization=case["quantization"])


def engine_of(backend: str, model: Path, case: dict[str, Any]) -> MegatronEngine:
    options = case["experts"] if backend == "te" else {}
    config = EngineConfig(
        path=str(model),
        backend=backend,
        max_tokens_per_mb=60,
        recompute=case["recompute"],
        dtype=case["dtype"],
        offload_activations=case["offload"] if backend == "te" else 0,
        shared_prefix=case["shared"] and backend == "te",
        mtp="train" if case["model"] == "mtp" else "carry",
        lora=adapters_of(model, case) if case["lora"] else LoraConfig(),
        optimizer=OptimizerConfig(**ADAM, clip_grad=1.0),
        **options,
    )
    engine = MegatronEngine(config, ParallelConfig(**case["layout"]))
    if backend == "te":
        engine.backend = dataclasses.replace(engine.backend, fused_delta_rule=False)
    engine.initialize()
    return engine


def dispatchers_of(engine: MegatronEngine) -> list[list[Any]]:
    """Names of the dispatchers of tokens, and if kernels sort tokens by expert."""
    layers = [m for module in engine.modules for m in module.modules() if isinstance(m, MoELayer)]
    found = {(type(layer.token_dispatcher).__name__, layer.config.moe_permute_fusion) for layer in layers}
    return sorted(map(list, found))


def overlapped(engine: MegatronEngine) -> list[bool]:
    """Of each layer that has shared experts: if its dispatcher runs them."""
    layers = [m for module in engine.modules for m in module.modules() if isinstance(m, MoELayer)]
    shared = [layer for layer in layers if layer.use_shared_expert]
    for layer in shared:
        assert layer.shared_expert_overlap == (layer.token_dispatcher.shared_experts is layer.shared_experts)
    return [layer.shared_expert_overlap for layer in shared]


def weights_of(engine: MegatronEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def trained(engine: MegatronEngine, batch: PackedBatch) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Log-probs, the first step's gradients, and the weights after each of two steps."""
    result = {"logprobs": engine.eval().logprobs(batch)}
    engine.train()
    stats = [engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")]
    result |= {f"gradient.{name}": t for name, t in gather_gradients(engine).items()}
    result |= {f"first.{name}": t for name, t in weights_of(engine).items()}
    stats.append(engine.train_batch(batch, logits_loss_fn, loss_weight_fn, loss_input="logits"))
    return result | {f"after.{name}": t for name, t in weights_of(engine).items()}, stats


def worst(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each kind of tensor; of gradients relative to the tensor's largest element."""
    errors: dict[str, float] = {}
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.isfinite().all(), name
        if tensor.numel():
            kind = name.split(".")[0]
            scale = float(second[name].abs().max()) if kind == "gradient" else 1.0
            errors[kind] = max(errors.get(kind, 0.0), float((tensor - second[name]).abs().max()) / scale)
    return errors


def only(kind: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"{kind}.")}


def resumed(engine: MegatronEngine, state: Path, batch: PackedBatch, kind: str) -> dict[str, Tensor]:
    """Weights after a step from the state in a folder."""
    engine.load_state(state)
    engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
    return {f"{kind}.{name}": t for name, t in weights_of(engine).items()}


def unmark_grouped(patch: pytest.MonkeyPatch) -> None:
    """Leaves marks out where the layer itself cuts nothing, as Transformer Engine does from 2.13 on."""
    add = GroupedLinear._add

    def add_unmarked(self: GroupedLinear, suffix: str, a: Any) -> None:
        add(self, suffix, a)
        if a.parallel_mode is None:
            for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                delattr(getattr(self, f"weight{suffix}"), name)

    patch.setattr(GroupedLinear, "_add", add_unmarked)


def mark_only_replicas(module: torch.nn.Module, mode: str | None, use_expert_pgs: bool) -> None:
    """Marks experts as Megatron-core before 0.19: whose replicas they are, and not that they are cut."""
    for parameter in module.parameters(recurse=False):
        parameter.allreduce = not use_expert_pgs  # type: ignore[attr-defined]


def norms_by_marks(model: Path, case: dict[str, Any], batch: PackedBatch) -> dict[str, float]:
    """The first step's gradient norm by who marks the weights of experts as cut."""
    norms = {}
    for name in ("both", "Megatron", "nobody"):
        with pytest.MonkeyPatch.context() as patch:
            if name != "both":
                unmark_grouped(patch)
            if name == "nobody":
                patch.setattr(megatron_te, "_set_expert_parameter_attributes", mark_only_replicas)
                with pytest.raises(RuntimeError, match="is split over tensor parallel ranks without Megatron's mark"):
                    engine_of("te", model, case)
                patch.setattr(engine_module, "check_split_marks", lambda *_: None)
            engine = engine_of("te", model, case)
            norms[name] = engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")["grad_norm"]
    return norms


def bits_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a state, of the parts of all ranks."""
    stored = StoredState(folder)
    kinds = ["weight", "exp_avg", "exp_avg_sq", *(["main"] if stored.dtype != torch.float32 else [])]
    return {
        f"{kind} {name}": stored.read(kind, name, (0,) * len(shape), shape)
        for name, shape in stored.shapes.items()
        for kind in (kinds if stored.kinds[name] == "weight" else [stored.kinds[name]])
    }


def differing_bits(engine: MegatronEngine, state: Path, work: Path) -> list[str]:
    """Tensors that differ after the engine has loaded a state and saved it again."""
    engine.load_state(state)
    engine.save_state(work)
    dist.barrier()
    written, read = bits_of(state), bits_of(work)
    assert written.keys() == read.keys()
    return [name for name, tensor in written.items() if not torch.equal(tensor, read[name])]


def kept_in_forward(engine: MegatronEngine, batch: PackedBatch) -> int:
    """Bytes that autograd holds for the backward passes of a step, without weights."""
    weights = {p.untyped_storage().data_ptr() for module in engine.modules for p in module.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_batch(batch, loss_fn, loss_weight_fn, loss_input="logprobs")
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def measure(work: Path, case: dict[str, Any]) -> None:
    stored = load_file(work / case["model"] / ("shared.safetensors" if case["shared"] else "batch.safetensors"))
    groups_of_sequences = {"group_ids": stored.pop("group_ids")} if case["shared"] else {}
    batch = PackedBatch(stored.pop("cu_seqlens"), stored, groups_of_sequences)
    engines, results, stats, states = {}, {}, {}, {}
    for backend in ("te", "torch"):
        engine = engines[backend] = engine_of(backend, work / case["model"] / "model", case)
        states[backend] = work / case["name"] / backend
        engine.save_state(states[backend] / "start")
        results[backend], stats[backend] = trained(engine, batch)
        engine.save_state(states[backend] / "end")
    # Each backend goes on from the other's state, then from the start again, where Adam has taken no step.
    crossed = {
        a: resumed(engines[a], states[b] / "end", batch, "resumed")
        | resumed(engines[a], states[b] / "start", batch, "first")
        for a, b in (("te", "torch"), ("torch", "te"))
    }
    norms = norms_by_marks(work / case["model"] / "model", case, batch) if case["marks"] else {}
    bits = [
        name
        for a, b in (("te", "torch"), ("torch", "te"))
        for name in differing_bits(engines[a], states[b] / "end", states[a] / f"from_{b}")
    ]
    kept = kept_in_forward(engines["te"], batch)
    if engine.groups.rank == 0:
        save_file(results["te"], work / case["name"] / "out.safetensors")
        pairs = zip(stats["te"], stats["torch"], strict=True)
        facts = {
            **worst(results["te"], results["torch"]),
            "resumed": worst(only("resumed", crossed["te"]), only("resumed", crossed["torch"]))["resumed"],
            "again": worst(only("first", crossed["te"]), only("first", results["te"]))["first"],
            "norm": max(abs(a[name] / b[name] - 1) for a, b in pairs for name in NORMS if name in b),
            "norms": norms,
            "bits": bits,
            "kept": kept,
            "offloaded": Layers.made[-1].host_bytes if case["offload"] else [],
            "stats": stats["te"],
            "kernels": clip_grads.l2_norm_impl.__module__,
            "read": [sum(len(mb.input_ids) for mb in e._microbatches(batch)) for e in engines.values()],
            "layers": sorted({type(module).__name__ for module in engines["te"].modules[0].modules()}),
            "dispatchers": dispatchers_of(engines["te"]),
            "overlapped": [overlapped(engines[backend]) for backend in ("te", "torch")],
        }
        (work / case["name"] / "facts.json").write_text(json.dumps(facts))
    for engine in engines.values():
        engine.modules, engine.ddps = [], []
    groups.leave_layout()


def run_rank(rank: int, size: int, work: Path, cases: list[dict[str, Any]]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ["MEGARL_RENDEZVOUS"] = str(work / f"rendezvous_{size}")
    for case in cases:
        measure(work, case)
    groups.destroy()


def main(work: Path, cases: dict[str, list[dict[str, Any]]]) -> int:
    assert "stand_in" in transformer_engine.__file__, transformer_engine.__file__
    # float32 stands for bfloat16, whose rounding hides errors
    checks._check_float32 = checks._check_dispatcher = lambda *_: None
    shared_prefix.PAGE = 4  # branches of few tokens are shared
    flash_twin.register()
    delta_net.check_kernels = lambda: None  # gated delta nets run without their kernels here
    cpu_offload.MIN_ELEMENTS = 1
    torch.set_num_threads(1)
    platform.takes_gpu_options = lambda: True
    fork = multiprocessing.get_context("fork")
    for size, parts in cases.items():
        ranks = [fork.Process(target=run_rank, args=(rank, int(size), work, parts)) for rank in range(int(size))]
        for process in ranks:
            process.start()
        running = {process.sentinel: process for process in ranks}
        while running:
            ended = [running.pop(one) for one in connection.wait(list(running), timeout=WORLD_LIMIT_S)]
            for process in ended:
                process.join()  # its sentinel may come before its exit code
            if not ended or any(process.exitcode for process in ended):
                for process in running.values():
                    process.kill()
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
