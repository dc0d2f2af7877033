"""Memory estimate: exact for weights, and within 15% of real training steps in total."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from megarl.actor.config import EngineConfig, LoraConfig
from megarl.actor.sizes.memory import LayerBytes, StepLoad, TrainerMemory, trainer_memory
from megarl.actor.supervised import MegatronLMEngine, trained_tokens
from megarl.config import Config
from megarl.data.config import DatasetConfig
from megarl.families import read_config
from megarl.launcher.local import run_ranks
from megarl.parallel.config import ParallelConfig
from megarl.preflight.sizing import memory_of, model_beside
from megarl.types import PackedBatch
from tests.conftest import random_model
from tests.unit.actor.memory_worker import ENVIRONMENT, LENGTH, PER_MICROBATCH, SEQUENCES, batch, engine_fields

BIG = {
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 10,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "tie_word_embeddings": True,
}  # fmt: skip
TOLERANCE = 0.15
ADAPTERS = {"lora": {"rank": 16, "dropout": 0.1}}
Measured = dict[str, tuple[int, int]]
# By layout: its sizes, and the engine's knobs of each case.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, dict[str, Any]]]] = {
    "tp1": (
        {},
        {
            "nf4": {"lora": {"rank": 16, "quantization": "nf4"}},
            "none": {},
            "full": {"recompute": "full"},
            "adapters": ADAPTERS,
            "one base": {"lora": {"rank": 64}, "engines": 3},
        },
    ),
    "tp2": ({"tp_size": 2}, {"none": {}, "bfloat16": {"dtype": "bfloat16"}, "adapters": ADAPTERS}),
    "pp2": ({"pp_size": 2}, {"none": {}}),
    "dp2": ({"dp_size": 2}, {"none": {}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two configs without weights: one of 26 million parameters, and a tiny one."""
    big, tiny = tmp_path_factory.mktemp("big"), tmp_path_factory.mktemp("tiny")
    Qwen3Config(**BIG, architectures=["Qwen3ForCausalLM"]).save_pretrained(big)
    random_model("qwen3", tied=True).config.save_pretrained(tiny)
    return big, tiny


@pytest.fixture(scope="module")
def measured(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Measured]]:
    """Measures by layout, rank and case: growth of the process, and its parameters, in bytes.

    Each world runs all its layouts.
    """
    result: dict[str, list[Measured]] = {name: [] for name in LAYOUTS}
    for world in sorted({math.prod(sizes.values()) for sizes, _ in LAYOUTS.values()}):
        out = tmp_path_factory.mktemp(f"world{world}")
        layouts = {name: layout for name, layout in LAYOUTS.items() if math.prod(layout[0].values()) == world}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in ENVIRONMENT.items():
                patch.setenv(name, value)
            arguments = [*map(str, folders), str(out), json.dumps(layouts)]
            code = run_ranks("tests.unit.actor.memory_worker", arguments, world, out)
        assert code == 0, "\n".join(p.read_text()[-2000:] for p in out.glob("*.log"))
        for rank in range(world):
            for layout, cases in json.loads((out / f"rank_{rank}.json").read_text()).items():
                result[layout].append(cases)
    return result


def estimate(layout: str, case: str, rank: int) -> tuple[TrainerMemory, int]:
    """Estimates the memory of a rank as preflight does, for a run with these sequences: an engine's, and the total.

    Engines after the first are counted as a critic is.
    """
    sizes, cases = LAYOUTS[layout]
    config = Config(
        method="sft",
        actor=EngineConfig(max_tokens_per_mb=PER_MICROBATCH * LENGTH, **engine_fields(cases[case])),
        parallel=ParallelConfig(**sizes),
        train_dataset=DatasetConfig(batch_size=SEQUENCES, max_length=LENGTH),
    )
    stage = memory_of(config, Qwen3Config(**BIG))[rank if layout == "pp2" else 0]
    return stage, stage.total + (cases[case].get("engines", 1) - 1) * model_beside(config.actor, stage)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_is_within_15_percent_of_what_training_takes(
    layout: str, measured: dict[str, list[Measured]]
) -> None:
    for rank, cases in enumerate(measured[layout]):
        for case, (growth, parameters) in cases.items():
            expected, total = estimate(layout, case, rank)
            print(f"{layout} {case} rank {rank}: {growth / 2**20:.0f} MiB, estimated {total / 2**20:.0f}")
            assert abs(total / growth - 1) < TOLERANCE, (layout, case, rank, growth, expected)
            assert expected.weights == parameters


TOKENS = 96
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def kept_in_forward(config: EngineConfig, tokens: int = TOKENS) -> int:
    """Bytes of the distinct tensors that autograd holds when the loss is computed, without weights."""
    engine = MegatronLMEngine(config)
    engine.initialize()
    weights = {p.untyped_storage().data_ptr() for module in engine.modules for p in module.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not in_backward and tensor.untyped_storage().data_ptr() not in weights:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def loss_fn(logprobs: torch.Tensor, entropy: torch.Tensor, data: PackedBatch) -> torch.Tensor:
        in_backward.append(True)  # later calls of `pack` save recomputed tensors
        return logprobs.sum()

    in_backward: list[bool] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_batch(batch(343, 1, tokens), loss_fn, trained_tokens, loss_input="logprobs")
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.cpu_options("the estimate for GPUs is that of Transformer Engine's layers")
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3", "auto"),
        ("llama", "auto"),
        ("qwen3_moe", "sequential"),
        ("qwen3_moe", "grouped"),
        ("deepseek_v3", "sequential"),
    ],
)
def test_what_a_layer_keeps_for_backward_is_what_autograd_holds(
    family: str, experts: str, recompute: str, dtype: str, checkpoints: Callable[..., Path]
) -> None:
    kept = []
    for layers in (1, 3):
        alike = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
        folder = checkpoints(family, tied=True, **SHAPE, **alike, num_hidden_layers=layers)
        config = EngineConfig(path=str(folder), dtype=dtype, recompute=recompute, experts=experts)
        kept.append(kept_in_forward(config))
    per_layer = (kept[1] - kept[0]) / 2 / TOKENS
    assert LayerBytes.of(read_config(str(folder)), ParallelConfig(), config, on_gpu=False).kept == pytest.approx(
        per_layer, rel=0.03
    )


@pytest.mark.cpu_options("the estimate for GPUs is that of Transformer Engine's layers")
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral"])
def test_windows_sinks_and_sandwich_norms_are_counted(
    family: str, dtype: str, checkpoints: Callable[..., Path]
) -> None:
    """Without masks of windows, which hold an element for each query and key of a chunk."""
    kept, width = [], {"intermediate_size": 64} if family == "gpt_oss" else {}
    for layers in (1, 3):
        sizes = {**SHAPE, **width, "num_hidden_layers": layers, "sliding_window": 9}
        folder = checkpoints(family, tied=family == "gemma3_text", **sizes)
        kept.append(kept_in_forward(config := EngineConfig(path=str(folder), dtype=dtype)))
    per_layer = (kept[1] - kept[0]) / 2 / TOKENS
    assert LayerBytes.of(read_config(str(folder)), ParallelConfig(), config, on_gpu=False).kept == pytest.approx(
        per_layer, rel=0.11
    )


@pytest.mark.cpu_options("the estimate for GPUs is that of Transformer Engine's layers")
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("dtype", "recompute", "dropout"),
    [
        ("float32", "none", 0.1),
        ("float32", "selective", 0.0),
        ("bfloat16", "none", 0.0),
        pytest.param("bfloat16", "full", 0.1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_what_adapters_keep_for_backward_is_what_autograd_holds(
    family: str, dtype: str, recompute: str, dropout: float, checkpoints: Callable[..., Path]
) -> None:
    """With many tokens: a copy of the matrices A of a fused module is not counted."""
    kept, tokens = [], 10 * TOKENS
    for layers in (1, 3):
        alike = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
        folder = checkpoints(family, tied=True, **SHAPE, **alike, num_hidden_layers=layers)
        lora = LoraConfig(rank=8, dropout=dropout)
        config = EngineConfig(path=str(folder), dtype=dtype, recompute=recompute, lora=lora, max_tokens_per_mb=tokens)
        kept.append(kept_in_forward(config, tokens))
    per_layer = (kept[1] - kept[0]) / 2 / tokens
    assert LayerBytes.of(read_config(str(folder)), ParallelConfig(), config, on_gpu=False).kept == pytest.approx(
        per_layer, rel=0.03
    )


@pytest.mark.parametrize(
    ("layout", "rank", "held"),
    [({}, 0, 2), ({"pp_size": 4}, 0, 5), ({"pp_size": 4}, 3, 2), ({"pp_size": 2, "vpp_size": 2}, 0, 6)],
)
def test_a_gpu_holds_the_batches_in_flight_and_one_ahead(layout: dict[str, int], rank: int, held: int) -> None:
    """The host holds all of them; it is the device of a run on the CPU."""
    model, config = random_model("qwen3", tied=True, num_hidden_layers=4).config, EngineConfig(dtype="bfloat16")

    def bytes_of(microbatches: int, on_gpu: bool) -> int:
        load = StepLoad(1000, microbatches)
        return trainer_memory(model, ParallelConfig(**layout), config, load, rank, on_gpu).batch

    assert bytes_of(64, on_gpu=True) == bytes_of(8, on_gpu=True) == held * bytes_of(1, on_gpu=True)
    assert bytes_of(64, on_gpu=False) == 64 * bytes_of(1, on_gpu=False)


def test_a_rank_under_sequence_parallelism_keeps_its_tokens_latents_alone() -> None:
    def kept(rank: int, **layout: Any) -> float:
        """Bytes that a layer with latents of queries of this size keeps for each token."""
        model = random_model("deepseek_v3", tied=False, q_lora_rank=rank).config
        return LayerBytes.of(model, ParallelConfig(**layout), EngineConfig(), on_gpu=False).kept

    whole, half, cut = (
        kept(48, **layout) - kept(16, **layout)
        for layout in ({"tp_size": 1}, {"tp_size": 2, "sequence_parallel": True}, {"tp_size": 2})
    )
    assert whole == cut == 2 * half > 0


@pytest.mark.parametrize(
    ("dtype", "float32_head", "row"),
    [("float32", False, 4 * 128 + 2 * 4 * 64), ("bfloat16", True, 4 * 128 + 2 * 2 * 64 + 2 * 128)],
)
def test_a_token_of_the_head_takes_its_logits_and_two_hidden_states(dtype: str, float32_head: bool, row: int) -> None:
    """And a copy of the logits in the model's dtype, if that is narrower than the head's."""
    model = random_model("qwen3", tied=True, vocab_size=128).config
    config = EngineConfig(dtype=dtype, float32_head=float32_head, kept_logits_mb=1)
    norm = LayerBytes.of(model, ParallelConfig(), config, on_gpu=False).norm
    hidden = 64 * (4 if dtype == "float32" else 2)
    need = trainer_memory(model, ParallelConfig(), config, StepLoad(100), 0, on_gpu=False)
    assert need.head == 100 * (norm + hidden + row)


@pytest.mark.parametrize(("experts", "together"), [("auto", 4), ("grouped", 4), ("sequential", 1)])
def test_gradients_of_grouped_experts_are_in_memory_together(experts: str, together: int) -> None:
    """Transformer Engine's backward of a grouped product returns them all at once."""
    model, parallel = random_model("qwen3_moe", tied=True).config, ParallelConfig(dp_size=2, ep_size=2)
    config = EngineConfig(dtype="bfloat16", experts=experts)
    matrix = LayerBytes.of(model, parallel, config, on_gpu=True).matrix
    assert matrix == together * 2 * model.moe_intermediate_size * model.hidden_size * 2
