"""Kernel launches and waits of the host for each layer and microbatch, dense or of experts, without a GPU.

    python benchmarks/kernel_launches.py

Runs training steps of two and of three layers on the stand-in for Transformer Engine (`tests/te/stand_in`), and
subtracts. Each torch operation that reads or writes data counts as one launch, in forward or backward. A call of
Transformer Engine counts by its source, release 2.12 (`KERNELS`). Functions under torch.compile count as one launch.
Layers of Megatron's own GPT spec run in megarl's loop, on the same packed batch. Layers of experts are those of
Qwen3-30B-A3B, scaled down: 128 experts on one rank, 8 for a token. A grouped product counts as one launch.

Two lines follow the table, about CUDA graphs: which of the launches a graph of the MLP would hold, and how full
microbatches are, which a graph would need to be padded to one number of tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "te" / "stand_in"), str(ROOT)]
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from megatron.core.extensions import transformer_engine as megatron_te  # noqa: E402
from megatron.core.fusions import fused_bias_swiglu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformer_engine.pytorch import permutation, router  # noqa: E402
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig  # noqa: E402

from megarl.actor import checks  # noqa: E402
from megarl.actor.batch.balance import SequenceCost  # noqa: E402
from megarl.actor.batch.microbatch import plan_microbatches  # noqa: E402
from megarl.actor.config import EngineConfig  # noqa: E402
from megarl.actor.model import backends, fused_layers  # noqa: E402
from megarl.actor.supervised import MegatronLMEngine  # noqa: E402
from megarl.families.blocks import Experts, Layer  # noqa: E402
from megarl.parallel import platform  # noqa: E402
from megarl.types import PackedBatch, cu_seqlens_of  # noqa: E402

# Launches in forward and backward. Norm: its gradient of the weight is summed by a second kernel. Attention: flash-attn
# 2, whose backward has kernels before and after the main one.
KERNELS = {"norm": (1, 2), "product": (1, 2), "attention": (1, 3), "rope": (1, 1)}
# Kernels of functions that the stand-in marks: the map of rows is made in three passes (triton/permutation.py).
MARKED = {"make_row_id_map": 3}
LENGTHS = [5, 17, 9, 30, 3, 11, 20, 8]
SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "vocab_size": 128, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 24, "norm_topk_prob": True}
WAITS = {getattr(Tensor, name) for name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__")}
FREE = {  # operations that move no data
    "aten.detach", "aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten._unsafe_view",
    "aten.set_", "aten.resize_", "aten.lift_fresh", "aten.is_same_size", "aten.new_empty_strided",
}  # fmt: skip


class Count(TorchDispatchMode):
    """Counts launches in forward and in backward while it is open, outside of calls that count as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = [0, 0]
        self.inside = 0  # calls that count as a whole

    def add(self, launches: int) -> None:
        """Counts launches of the current pass, unless a call around them counts as a whole."""
        if not self.inside:
            self.launches[torch._C._current_graph_task_id() != -1] += launches

    @contextlib.contextmanager
    def whole(self, launches: int) -> Iterator[None]:
        """Counts what runs inside as so many launches."""
        self.add(launches)
        self.inside += 1
        yield
        self.inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and str(func.overloadpacket) not in FREE:
            self.add(1)
        return func(*args, **(kwargs or {}))


class Waits(TorchFunctionMode):
    """Counts reads of values by the host, except of tensors made there."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.total, self._count = 0, count
        self._of_host: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS and not self._count.inside and args[0].data_ptr() not in self._of_host:
            self.total += 1
        result = func(*args, **(kwargs or {}))
        if func is torch.tensor and "device" not in (kwargs or {}):
            self._of_host[result.data_ptr()] = result
        return result


COUNT = Count()
IN_MLP = [0, 0]  # launches between attention and the next layer, in forward and in backward


class Whole(torch.autograd.Function):
    """A call with its gradient, which counts as the kernels of Transformer Engine that run in its place."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.name = name
        with COUNT.whole(KERNELS[name][0]), torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
            ctx.output = function(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with COUNT.whole(KERNELS[ctx.name][1]):
            needed = [x for x in ctx.inputs if x.requires_grad]
            grads = iter(torch.autograd.grad(ctx.output, needed, grad, allow_unused=True))
            return None, None, *(next(grads) if x.requires_grad else None for x in ctx.inputs)


def count_calls() -> None:
    """Replaces the arithmetic of the stand-in, and compiled functions, by calls that count as a whole."""
    module = te.module
    norm, attend, rotate = module._rms_norm, te.DotProductAttention.forward, megatron_te.apply_rotary_pos_emb
    module._rms_norm = lambda x, weight, eps, offset: Whole.apply(
        "norm", lambda a, w: norm(a, w, eps, offset), x.contiguous(), weight
    )
    te.DotProductAttention.forward = lambda self, q, k, v, *args, **options: Whole.apply(
        "attention", lambda *qkv: attend(self, *qkv, *args, **options), q, k, v
    )
    megatron_te.apply_rotary_pos_emb = lambda t, freqs, **options: Whole.apply(
        "rope", lambda x: rotate(x, freqs, **options), t
    )
    module._AddingToMainGrad = Accumulating
    module.F = type("Functions", (), {"linear": staticmethod(lambda x, w: Whole.apply("product", _linear, x, w))})
    module.F.rms_norm = torch.nn.functional.rms_norm
    for part in (module, permutation, router):
        setattr(part, "kernel", lambda name: COUNT.whole(MARKED.get(name, 1)))  # noqa: B010 (which the part calls)
    gemm, dummy = moe_utils.te_general_gemm, module.get_dummy_wgrad
    module.get_dummy_wgrad = lambda *args: _whole(lambda: dummy(*args), launches=0)  # memory that is not written
    moe_utils.te_general_gemm = lambda *args, **options: _whole(lambda: gemm(*args, **options))
    for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back"):
        compiled = getattr(fused_bias_swiglu, name)
        setattr(fused_bias_swiglu, name, lambda *a, run=compiled: _whole(run, *a))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def _whole(run: Callable[..., Tensor], *tensors: Tensor, launches: int = 1) -> Tensor:
    with COUNT.whole(launches):
        return run(*tensors)


AddingToMainGrad = te.module._AddingToMainGrad


class Accumulating(AddingToMainGrad):
    """A product whose backward adds the weight's gradient to `main_grad`, as one of its two kernels."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        with COUNT.whole(KERNELS["product"][0]):
            return AddingToMainGrad.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        _ = ctx.saved_tensors  # what is recomputed counts by itself
        with COUNT.whole(KERNELS["product"][1]):
            return AddingToMainGrad.backward(ctx, grad)


def count_mlps() -> None:
    """Counts launches from attention's sum to the layer's output: what `cuda_graph_modules=mlp` captures."""
    run = TransformerLayer._forward_mlp

    def counted(self: TransformerLayer, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        def left(_: Tensor) -> None:
            IN_MLP[1] += COUNT.launches[1]

        def entered(_: Tensor) -> None:
            IN_MLP[1] -= COUNT.launches[1]

        hidden.register_hook(left)
        IN_MLP[0] -= COUNT.launches[0]
        output: Tensor = run(self, hidden, *args, **options)
        IN_MLP[0] += COUNT.launches[0]
        output.register_hook(entered)
        return output

    TransformerLayer._forward_mlp = counted


def fill(most_tokens: int) -> float:
    """Share of real tokens in microbatches padded to `most_tokens`: 512 completions of mixed lengths on 8 ranks."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(7.0 + torch.randn(512, generator=generator)).long().clamp(64, most_tokens)
    batch = PackedBatch(cu_seqlens_of(lengths), {"input_ids": torch.zeros(int(lengths.sum()), dtype=torch.long)})
    rows = plan_microbatches(batch, SequenceCost.of(model(2, sparse=False)), 8, most_tokens)
    return int(lengths.sum()) / (most_tokens * sum(len(row) for row in rows))


@dataclasses.dataclass(frozen=True)
class MegatronsSpec(backends.LayerBackend):
    """Layers of Megatron's own GPT spec for Transformer Engine."""

    def layer_spec(self, layer: Layer) -> ModuleSpec:
        experts = layer.mlp.count if isinstance(layer.mlp, Experts) else None
        spec = get_gpt_layer_with_transformer_engine_submodules(
            num_experts=experts, moe_grouped_gemm=True, qk_layernorm=layer.attention.qk_norm
        )
        parts = spec.self_attention.submodules
        parts.linear_qkv, parts.linear_proj = map(fused_layers.accumulating, (parts.linear_qkv, parts.linear_proj))
        if experts is not None:
            sparse = spec.mlp.keywords["submodules"]
            sparse.experts = fused_layers.accumulating_experts(sparse.experts)
            return ModuleSpec(TransformerLayer, submodules=spec)
        fc1, fc2 = megatron_te.TELayerNormColumnParallelLinear, megatron_te.TERowParallelLinear
        spec.mlp.keywords["submodules"].linear_fc1 = fused_layers.accumulating(fc1)
        spec.mlp.keywords["submodules"].linear_fc2 = fused_layers.accumulating(fc2)
        return ModuleSpec(TransformerLayer, submodules=spec)


def megatrons(backend: backends.LayerBackend) -> backends.LayerBackend:
    fields = {f.name: getattr(backend, f.name) for f in dataclasses.fields(backend)}
    return MegatronsSpec(**{**fields, "config_fields": {**backend.config_fields, "bias_dropout_fusion": True}})


def unfused(backend: backends.LayerBackend, *fields: str) -> backends.LayerBackend:
    """The backend as it was: modules without fusion; `fields` of Megatron's config are left out."""
    provider = megatron_te.TEColumnParallelLinear, megatron_te.TERowParallelLinear
    kept = {name: value for name, value in backend.config_fields.items() if name not in fields}
    column, row = provider
    return replace(
        backend,
        norm_linear=None,
        mlp=backends.MLP,
        column_linear=column,
        row_linear=row,
        config_fields=kept,
        recompute_modules=("core_attn", "mlp", "moe"),
    )


Change = Callable[[backends.LayerBackend], backends.LayerBackend]
CASES: list[tuple[str, str, Change]] = [
    ("no fusion", "none", lambda b: unfused(b, "bias_activation_fusion", "apply_rope_fusion")),
    ("rotary positions fused (before)", "none", lambda b: unfused(b, "bias_activation_fusion")),
    ("all fused", "none", lambda b: b),
    ("Megatron's own GPT spec", "none", megatrons),
    ("before, recompute=selective", "selective", lambda b: unfused(b, "bias_activation_fusion")),
    ("all fused, recompute=selective", "selective", lambda b: b),
    ("all fused, recompute=full", "full", lambda b: b),
]
SPARSE: list[tuple[str, str, Change]] = [
    ("experts: routing not fused, as with replay", "none", lambda b: replace(b, fused_routing=False)),
    ("experts: all fused", "none", lambda b: b),
    ("experts: Megatron's own GPT spec", "none", megatrons),
    ("experts: all fused, recompute=selective", "selective", lambda b: b),
    ("experts: all fused, recompute=full", "full", lambda b: b),
]


def model(layers: int, sparse: bool) -> PretrainedConfig:
    if sparse:
        return Qwen3MoeConfig(**SHAPE, **EXPERTS, num_hidden_layers=layers, architectures=["Qwen3MoeForCausalLM"])
    return Qwen3Config(**SHAPE, num_hidden_layers=layers, architectures=["Qwen3ForCausalLM"])


def measure(folder: Path, model: PretrainedConfig, recompute: str, change: Change) -> tuple[int, int, int]:
    """Launches in forward and backward of a step of one microbatch, and waits of the host."""
    model.save_pretrained(folder)
    config = EngineConfig(path=str(folder), init="random", dtype="bfloat16", backend="te", recompute=recompute)
    engine = MegatronLMEngine(config)
    engine.backend = change(engine.backend)
    engine.initialize()
    run, counts = engine._run, []

    def counted(*args: Any, **options: Any) -> Any:
        COUNT.launches, waits = [0, 0], Waits(COUNT)
        with COUNT, waits:
            result = run(*args, **options)
        counts.append((*COUNT.launches, waits.total))
        return result

    engine._run = counted  # type: ignore[method-assign]
    total = sum(LENGTHS)
    tensors = {"input_ids": torch.randint(0, 128, (total,)), "loss_mask": torch.ones(total, dtype=torch.bool)}
    engine.train_lm(PackedBatch(cu_seqlens_of(torch.tensor(LENGTHS)), tensors))
    engine.destroy()
    return counts[0]


def main() -> None:
    platform.takes_gpu_options = lambda: True
    checks.check_device = lambda *_: None
    count_calls()
    print(f"{len(LENGTHS)} sequences; launches and waits of each layer and microbatch\n")
    print("| layers | forward | backward | together | waits |\n| --- | --- | --- | --- | --- |")
    count_mlps()
    with tempfile.TemporaryDirectory() as folder:  # Megatron makes a tensor in the first step with experts
        measure(Path(folder), model(2, sparse=True), "none", lambda b: b)
    for name, recompute, change in CASES + SPARSE:
        with tempfile.TemporaryDirectory() as folder:
            sparse = name.startswith("experts")
            two, three = (measure(Path(folder), model(layers, sparse), recompute, change) for layers in (2, 3))
        forward, backward, waits = (b - a for a, b in zip(two, three, strict=True))
        print(f"| {name} | {forward} | {backward} | {forward + backward} | {waits} |")
    IN_MLP[:] = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), model(1, sparse=False), "none", lambda b: b)
    print(
        f"\nIn a graph of a dense layer's MLP, all fused: {IN_MLP[0]} launches in forward and {IN_MLP[1]} in backward"
    )
    print("Real tokens of microbatches:", ", ".join(f"{fill(n):.0%} of {n:,}" for n in (8192, 16384, 32768)))


if __name__ == "__main__":
    main()
