"""A frozen base in 4 or 8 bits: PEFT's numbers on bitsandbytes' layers, what autograd keeps, files, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from megarl import export
from megarl.actor.checkpoint.stored_state import check_facts
from megarl.actor.checks import device_checks, knob_checks, model_checks
from megarl.actor.config import EngineConfig, LoraConfig, OptimizerConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model.attention.latent import ReplicatedLinear
from megarl.actor.model.quantised_base import moved, without_weights
from megarl.actor.weights import quantised
from megarl.actor.weights.adapter_shards import shape_of
from megarl.actor.weights.quantised import QuantisedWeight, dequantise, quantise
from megarl.families import read_config, with_adapters
from megarl.knobs import UserError, run_all
from megarl.parallel.config import ParallelConfig
from megarl.parallel.determinism import OFF
from megarl.types import PackedBatch, cu_seqlens_of

LORA = LoraConfig(rank=4, alpha=6.0, quantization="nf4")
LENGTHS = [7, 12, 3]


@pytest.fixture(scope="module")
def base(checkpoints: Callable[..., Path]) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
    return checkpoints(family="qwen3", tied=True, vocab_size=341, **sizes)


@pytest.fixture
def engine_of(base: Path) -> Iterator[Callable[..., MegatronEngine]]:
    """Starts engines on the quantised base, and ends them."""
    started: list[MegatronEngine] = []

    def start(on: MegatronEngine | None = None, **fields: Any) -> MegatronEngine:
        knobs = {"path": str(base), "lora": LORA, "optimizer": OptimizerConfig(lr=0.01), **fields}
        started.append(MegatronEngine(EngineConfig(**knobs)))
        started[-1].initialize(base=on)
        return started[-1]

    yield start
    while started:
        started.pop().destroy()


def batch() -> PackedBatch:
    ids = torch.randint(0, 341, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    return PackedBatch(cu_seqlens_of(torch.tensor(LENGTHS)), {"input_ids": ids, "loss_mask": torch.ones(len(ids)) > 0})


def logprobs_of(model: Any) -> Tensor:
    """Log-probs of each token but a sequence's first by a transformers model."""
    parts = []
    for ids in batch()["input_ids"].split(LENGTHS):
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1)
        parts += [torch.zeros(1), table.gather(1, ids[1:, None]).squeeze(1)]
    return torch.cat(parts)


def nll(logprobs: Tensor, entropy: Tensor, data: PackedBatch) -> Tensor:
    return -logprobs.mean()


def step(engine: MegatronEngine) -> dict[str, float]:
    engine.train()
    return engine.train_batch(batch(), nll, lambda data: data["loss_mask"].sum(), loss_input="logprobs")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("quantization", ["nf4", "blockwise8"])
def test_log_probs_and_gradients_are_those_of_peft(
    quantization: str, base: Path, tmp_path: Path, engine_of: Callable[..., MegatronEngine]
) -> None:
    """PEFT's base: for nf4 bitsandbytes' own layers; for blockwise8, whose layers it lacks, rounded weights."""
    engine = engine_of(lora=dataclasses.replace(LORA, quantization=quantization))
    for _ in range(2):  # B is zero before the first
        step(engine)
    engine.save(tmp_path / "adapter")
    if quantization == "nf4":
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four_bits, device_map="cpu")
        layer = model.model.layers[1].mlp.gate_proj
        assert isinstance(layer, bitsandbytes.nn.Linear4bit)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                state = bitsandbytes.functional.quantize_blockwise(module.weight.data, blocksize=64)
                module.weight.data = bitsandbytes.functional.dequantize_blockwise(*state)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    adapted.train()
    expected = logprobs_of(adapted)
    close(engine.eval().logprobs(batch()), expected.detach())
    (-expected.sum() / len(expected)).backward()
    norm = torch.cat([p.grad.flatten() for p in adapted.parameters() if p.grad is not None]).norm()
    stats = step(engine)
    assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(base)
    with engine.base_alone(), torch.no_grad():
        assert (engine.eval().logprobs(batch()) - logprobs_of(plain)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "blockwise8"])
def test_no_cut_between_blocks_changes_a_value(kind: str, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = dequantise(*quantise(weight, kind), kind, dtype)
    assert 0 < (whole - weight).abs().max() < (0.6 if kind == "nf4" else 0.06)
    for parts, dim in ((weight.split(5), 0), (weight.split(64, dim=1), 1)):
        assert torch.equal(torch.cat([quantised.rounded(part, kind) for part in parts], dim), whole)
    if kind == "nf4":  # of the 8-bit floats, -1 has no code
        assert torch.equal(quantised.rounded(whole, kind), whole)
    assert whole.dtype == dtype


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autograd_keeps_codes_and_no_weight_is_left_after_a_layer(
    recompute: str, engine_of: Callable[..., MegatronEngine]
) -> None:
    engine = engine_of(recompute=recompute)
    every = [module for stage in engine.modules for module in stage.modules()]
    layers = [module for module in every if isinstance(getattr(module, "quantised", None), QuantisedWeight)]
    assert len(layers) == 4 * engine.hf_config.num_hidden_layers
    made: list[int] = []
    original = QuantisedWeight.read

    def counted(weight: QuantisedWeight, *rows: slice) -> Tensor:
        made.append(id(weight))
        return original(weight, *rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantisedWeight, "read", counted)
        step(engine)
    # Forward and backward make each once. The first layer's input needs no gradient: its QKV is made once less.
    assert len(made) >= (3 if recompute == "full" else 2) * len(layers) - 1
    assert not any("weight" in layer.__dict__ or "weight" in layer._parameters for layer in layers)
    held = {p.dtype for layer in layers for p in layer.quantised.parameters()}
    assert held == {torch.uint8, torch.float32}


def test_engines_on_one_base_share_its_codes(engine_of: Callable[..., MegatronEngine]) -> None:
    first = engine_of()
    second = engine_of(on=first, lora=dataclasses.replace(LORA, init_seed=9))
    named = [[item for module in engine.modules for item in module.named_parameters()] for engine in (first, second)]
    codes = [{name: p.data_ptr() for name, p in found if ".quantised." in name} for found in named]
    assert codes[0]
    assert codes[0] == codes[1]
    losses = [step(engine)["loss"] for engine in (first, second, first)]
    assert losses[0] == losses[1] > losses[2]
    with pytest.raises(UserError, match=r"actor\.lora\.quantization=none differs from the shared base's nf4"):
        engine_of(on=first, lora=dataclasses.replace(LORA, quantization="none"))


def test_the_merged_export_is_what_was_trained(
    tmp_path: Path, engine_of: Callable[..., MegatronEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    for _ in range(2):
        step(engine)
    served = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.save_state(tmp_path / "step" / "actor")
    trained = engine.eval().logprobs(batch())
    monkeypatch.setattr(export, "find", lambda *_: export.Manifest(tmp_path / "step", 2, {}))
    export.export(export.ExportConfig(checkpoint="any", output=str(tmp_path / "merged"), merge=True))
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(served[name], tensor) for name, tensor in written.items())
    with torch.no_grad():
        close(trained, logprobs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")))
    engine.load_state(tmp_path / "step" / "actor")
    adapters = shape_of(dataclasses.replace(LORA, quantization="blockwise8"))
    assert adapters is not None
    with pytest.raises(UserError, match=r"quantization=nf4, this run.s has quantization=blockwise8"):
        check_facts(tmp_path / "step" / "actor", with_adapters(engine.hf_config, adapters), "float32")


def refusal(config: EngineConfig, sizes: dict[str, Any]) -> str:
    parallel = ParallelConfig(**sizes)
    model = model_checks(config, parallel, read_config(config.path))
    with pytest.raises(UserError) as error:
        run_all((*knob_checks(config, parallel), *model, *device_checks(config, parallel, OFF)))
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        ({"lora": LoraConfig(quantization="nf4")}, {}, "without adapters (actor.lora.rank=0) all weights are trained"),
        ({"lora": dataclasses.replace(LORA, quantization="nf5")}, {}, "actor.lora.quantization=nf5"),
        ({}, {"tp_size": 4}, "has a scale for 64 columns, and model.layers.0.self_attn.o_proj has 32 on a rank"),
        ({"fp8": "blockwise", "dtype": "bfloat16"}, {}, "actor.fp8=blockwise"),
    ],
)
def test_a_base_that_cannot_be_quantised_is_refused_in_one_line(
    fields: dict[str, Any], sizes: dict[str, Any], message: str, checkpoints: Callable[..., Path], base: Path
) -> None:
    told = refusal(EngineConfig(**{"path": str(base), "lora": LORA, **fields}), sizes)
    assert message in told
    assert "\n" not in told


def test_servers_of_the_checkpoint_do_not_hold_a_quantised_base() -> None:
    assert LoraConfig(rank=4).starts_as_checkpoint
    assert not LORA.starts_as_checkpoint


def test_a_missing_library_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    assert "needs the package bitsandbytes" in refusal(EngineConfig(path=str(base), lora=LORA), {})


def test_linear_layers_alone_are_built_without_memory() -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    with without_weights():
        linear, norm, biased = ReplicatedLinear(8, 4, config=config), torch.nn.LayerNorm(4), torch.nn.Linear(8, 4)
    assert linear.weight.is_meta
    assert (linear.weight.shape, linear.weight.sequence_parallel) == ((4, 8), True)
    assert not any(parameter.is_meta for module in (norm, biased) for parameter in module.parameters())
    assert not ReplicatedLinear(8, 4, config=config).weight.is_meta, "as before once the model is built"


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_moves_keeps_its_marks(trained: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16), requires_grad=trained)
    parameter.allreduce = False  # type: ignore[attr-defined]  # Megatron's mark of experts
    there = moved(parameter, "meta")
    assert (there.shape, there.dtype, there.requires_grad) == (parameter.shape, torch.bfloat16, trained)
    assert there.is_meta
    assert there.__dict__ == {"allreduce": False}
