"""The backend `te` on the stand-in of Transformer Engine: equal to `torch`, and to transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.actor.config import RECOMPUTE, EngineConfig
from megarl.actor.sizes.memory import LayerBytes
from megarl.actor.weights.peft_files import write
from megarl.actor.weights.shards import tensor_shapes
from megarl.families import Adapters, read_config, with_adapters
from megarl.families.adapters import ALL_LINEAR
from megarl.parallel.config import ParallelConfig
from megarl.types import cu_seqlens_of
from tests import rows
from tests.distributed.test_layouts import LLAMA3_ROPE, make_batch, reference_logprobs, reference_steps
from tests.mtp_oracle import add_layers

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
SP = {"tp_size": 2, "sequence_parallel": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3", "tied": False, "vocab_size": 341},
    "llama_biased": {"family": "llama", "tied": False, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    "mha": {"family": "mistral", "tied": False, "sliding_window": None, "num_key_value_heads": 4},
    "mixtral": {"family": "mixtral", "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False, "mlp_only_layers": [1]},
    "gemma3": {
        "family": "gemma3_text", "tied": True, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"family": "gpt_oss", "tied": False},
    "latent": {"family": "deepseek_v3", "tied": False},  # a dense layer and a sparse one
    "blocks": {  # whose rows are whole blocks of a quantised base, on two ranks too
        "family": "qwen3", "tied": False, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
        "head_dim": 16,
    },
    "gated": {"family": "qwen3_next", "tied": False},  # shared experts that a sigmoid scales
    "mtp": {"family": "glm4_moe", "tied": False},  # and a layer of multi-token prediction, which is trained
}  # fmt: skip
SHARED = "shared"  # common beginnings are read once by `te`, and by `torch` with each sequence
# In place of recompute, too: knobs of experts, a layer offloaded, or bfloat16.
EXPERTS = {"sequential": {"experts": "sequential"}, "flex": {"moe_dispatcher": "flex"}}
OFFLOADED, SIXTEEN = "offloaded", "bfloat16"
QUANTISED = "quantised"
LATE = "adapters_offloaded"  # a layer without adapters offloaded, before one with them
SHARED_EXPERTS = [f"shared_experts.{name}_proj" for name in ("gate", "up", "down")]
# With the adapters of a model's folder, and their recompute mode.
ADAPTED = {"adapters": "none", "adapters_selective": "selective", QUANTISED: "none", LATE: "none"}
RUN_LIMIT_S = 3000  # of all cases; for a hang alone
TIMEOUT = pytest.mark.timeout(RUN_LIMIT_S + 600)  # of a test, the run of its cases included
pytestmark = [*rows.marks(), TIMEOUT]
OVERLAPPED: list[tuple[str, dict[str, Any], str]] = [  # shared experts of `te` beside the exchange of tokens
    ("gated", SP, "none"),
    ("latent", {"dp_size": 2, "ep_size": 2}, "full"),
]
CASES: dict[int, list[tuple[str, dict[str, Any], str]]] = {  # by ranks: model, layout, recompute
    1: rows.every(3, [
        ("qwen3", {}, "selective"),
        ("qwen2_tied", {}, "none"),
        ("mha", {}, "none"),
        ("llama_biased", {}, "full"),
        ("qwen3_moe", {}, "full"),
        ("qwen3_moe", {}, "none"),
        ("mixtral", {}, "selective"),
        ("gemma3", {}, "selective"),
        ("qwen3_moe", {}, "sequential"),
        ("qwen3", {}, OFFLOADED),
        ("qwen3", {}, SHARED),
        ("mha", {}, SHARED),
        ("qwen3", {}, "none"),
        ("mixtral", {}, SHARED),
        ("latent", {}, "selective"),
        ("latent", {}, "none"),
        ("latent", {}, SHARED),
        ("gpt_oss", {}, "none"),
        ("mtp", {}, "full"),
        ("qwen3", {}, "adapters_selective"),
        ("llama_biased", {}, SIXTEEN),
        ("gpt_oss", {}, SIXTEEN),  # its router has a bias
        ("qwen3", {}, "adapters"),
        ("latent", {}, "adapters"),
        ("blocks", {}, QUANTISED),
        ("qwen3_moe", {}, "adapters"),
        ("qwen3_moe", {}, SIXTEEN),
        ("latent", {}, LATE),  # with shared experts, which copy the configuration
        ("latent", {}, OFFLOADED),
    ]),
    2: rows.every(16, [
        ("qwen3", {"tp_size": 2}, "none"),
        ("llama_biased", SP, "selective"),
        ("qwen2_tied", {"cp_size": 2}, "full"),
        ("qwen3", {"cp_size": 2}, "selective"),
        ("qwen2_tied", {"pp_size": 2}, "none"),
        ("gemma3", SP, "none"),
        ("gpt_oss", {**SP, "ep_size": 2, "etp_size": 1}, "none"),
        ("qwen3_moe", {**SP, "ep_size": 2, "etp_size": 1}, "none"),
        ("mixtral", {"cp_size": 2, "ep_size": 2}, "none"),
        ("mixtral", {**SP, "ep_size": 2, "etp_size": 1}, "none"),
        ("mixtral", {**SP, "ep_size": 2, "etp_size": 1}, "flex"),
        ("qwen3_moe", {"dp_size": 2, "ep_size": 2}, "flex"),
        ("latent", {**SP, "ep_size": 2, "etp_size": 1}, "none"),
        ("latent", {"cp_size": 2, "ep_size": 2}, "none"),
        ("mtp", {**SP, "ep_size": 2, "etp_size": 1}, "none"),
        ("mtp", {"pp_size": 2}, "selective"),
        ("qwen3", SP, "adapters"),
        ("blocks", SP, QUANTISED),
        ("qwen3_moe", {**SP, "ep_size": 2, "etp_size": 1}, "adapters"),
        ("llama_biased", {"tp_size": 2}, SHARED),
        ("qwen3", SP, SHARED),
        ("qwen2_tied", {"pp_size": 2}, SHARED),
        ("mixtral", {**SP, "ep_size": 2, "etp_size": 1}, SHARED),
    ]) + OVERLAPPED,
    4: rows.every(2, [
        ("mixtral", {**SP, "dp_size": 2, "ep_size": 2}, "none"),  # experts cut by ep 2 and tp 2
        ("mixtral", {**SP, "dp_size": 2, "ep_size": 2}, "flex"),
    ]),
}  # fmt: skip
DENSE = ("qwen3-selective-", "qwen2_tied-none-", "mha-none-", "llama_biased-full-")
MARKS = "mixtral-none-tp_size-sequence_parallel-dp_size-ep_size"  # the case run with other marks of experts too
NAMES = {ranks: [f"{m}-{r}-" + "-".join(layout) for m, layout, r in cases] for ranks, cases in CASES.items()}


def make_shared_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    """Completions of two prompts, and conversations that part after one turn or two, all mixed."""
    generator = torch.Generator().manual_seed(vocab_size)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator)

    first, second, system = tokens(18), tokens(5), tokens(9)
    turn = torch.cat((system, tokens(16)))
    later = torch.cat((turn, tokens(12)))
    sequences = [
        *[(0, torch.cat((first, tokens(n)))) for n in (4, 11, 1)],
        *[(2, torch.cat((start, tokens(n)))) for start, n in ((later, 9), (system, 7), (turn, 8), (later, 3))],
        *[(1, torch.cat((second, tokens(n)))) for n in (6, 20)],
        (3, tokens(14)),
    ]
    order = torch.randperm(len(sequences), generator=generator).tolist()
    groups, ids = zip(*(sequences[i] for i in order), strict=True)
    cu_seqlens = cu_seqlens_of(torch.tensor([len(row) for row in ids]))
    mask = torch.rand(int(cu_seqlens[-1]), generator=generator) < 0.7
    mask[cu_seqlens[:-1].long()] = False
    return {
        "cu_seqlens": cu_seqlens,
        "input_ids": torch.cat(ids),
        "loss_mask": mask,
        "advantages": torch.randn(len(mask), generator=generator),
        "group_ids": torch.tensor(groups),
    }


def targets_of(option: str) -> list[str]:
    return SHARED_EXPERTS if option == LATE else [ALL_LINEAR]


def write_adapter(source: Path, folder: Path, targets: list[str]) -> None:
    """Writes an adapter of a model's linear layers, with rank 4 and alpha 6."""
    adapters, generator = Adapters(4, tuple(targets), 6.0), torch.Generator().manual_seed(7)
    shapes = tensor_shapes(with_adapters(read_config(str(source)), adapters))
    tensors = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    write(folder, tensors, adapters, 0.0, str(source))


@pytest.fixture(scope="module")
def work(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases once, and returns the folder with their results."""
    folder = tmp_path_factory.mktemp("stand_in")
    for name, fields in MODELS.items():
        (folder / name).mkdir()
        source = checkpoints(**fields)
        (folder / name / "model").symlink_to(add_layers(source, folder / "layers") if name == "mtp" else source)
        save_file(make_batch(fields.get("vocab_size", 343)), folder / name / "batch.safetensors")
        save_file(make_shared_batch(fields.get("vocab_size", 343)), folder / name / "shared.safetensors")
        for option in {option for parts in CASES.values() for model, _, option in parts if model == name} & {*ADAPTED}:
            write_adapter(source, folder / name / option, targets_of(option))
    cases: dict[str, list[dict[str, Any]]] = {}
    for ranks, parts in CASES.items():
        for name, (model, layout, recompute) in zip(NAMES[ranks], parts, strict=True):
            (folder / name).mkdir()
            case = {
                "name": name,
                "model": model,
                "layout": layout,
                "recompute": recompute if recompute in RECOMPUTE else ADAPTED.get(recompute, "none"),
                "dtype": "bfloat16" if recompute == SIXTEEN else "float32",
                "experts": EXPERTS.get(recompute, {}),
                "marks": name == MARKS,
                "offload": 1 if recompute in (OFFLOADED, LATE) else 0,
                "lora": recompute if recompute in ADAPTED else "",
                "targets": targets_of(recompute),
                "quantization": "nf4" if recompute == QUANTISED else "none",
                SHARED: recompute == SHARED,
            }
            cases.setdefault(str(ranks), []).append(case)
    run_cases("tests.te.stand_in_worker", folder, cases)
    return folder


def run_cases(worker: str, folder: Path, cases: dict[str, list[dict[str, Any]]]) -> None:
    """Has a worker run cases, by number of ranks, on the stand-in. It leaves their facts in the folder."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", worker, str(folder), json.dumps(cases)],
        cwd=ROOT,
        # Without a compiler for Megatron's functions: it takes longer than they do here.
        env={**os.environ, "PYTHONPATH": f"{STAND_IN}:{ROOT}", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]


def facts_of(work: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((work / name / "facts.json").read_text())
    return facts


def test_the_stand_in_is_seen_by_nobody_else() -> None:
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is None or str(STAND_IN) not in str(spec.origin)


ALL = [name for names in NAMES.values() for name in names]
EXACT = [name for name in ALL if SIXTEEN not in name]


@pytest.mark.parametrize("name", EXACT)
def test_te_equals_torch(name: str, work: Path) -> None:
    """Log-probs, gradients relative to a tensor's largest, weights after each step and after each other's states."""
    facts = facts_of(work, name)
    errors = {k: facts[k] for k in ("logprobs", "gradient", "first", "after", "resumed", "norm")}
    assert {k: error for k, error in errors.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize("name", ALL)
def test_a_state_of_either_names_is_loaded_and_saved_again_bit_for_bit(name: str, work: Path) -> None:
    """Weights, main parameters and moments, from the layers of `torch` to fused ones and back."""
    assert facts_of(work, name)["bits"] == []


@pytest.mark.parametrize("name", EXACT)
def test_adam_counts_from_the_start_again_after_a_state_without_steps(name: str, work: Path) -> None:
    assert facts_of(work, name)["again"] <= 1e-6


@pytest.mark.parametrize("name", ALL)
def test_the_model_is_of_transformer_engines_layers(name: str, work: Path) -> None:
    layers, option = set(facts_of(work, name)["layers"]), name.split("-")[1]
    plain = dict.fromkeys(ADAPTED, "TEColumnParallelLinear")  # an adapter reads what the norm returns
    plain[QUANTISED] = "ColumnParallelLinear"
    norm_linear = {"selective": "NormColumnLinear", **plain}.get(option, "TELayerNormColumnParallelLinear")
    row_linear = "RowParallelLinear" if option == QUANTISED else "TERowParallelLinear"
    expected = {norm_linear, row_linear, "TEDotProductAttention", "RotaryTable"}
    if option in ("selective", "adapters_selective") and not name.startswith(("mixtral", "gemma3")):
        expected |= {"RecomputingMLP"}
    if option == "sequential":
        expected |= {"SequentialMLP", "ColumnParallelLinear", "RowParallelLinear"}
    elif name.startswith(("mixtral", "qwen3_moe", "gpt_oss", "latent")):
        expected |= {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    expected = (expected - {"TEDotProductAttention"}) | {"SharedPromptAttention"} if SHARED in name else expected
    assert expected <= layers
    assert not layers & {"PackedAttention", "BiasedRowParallelLinear"}
    if name.startswith(("mixtral", "qwen3_moe", "latent")):
        dispatcher = "MoEFlexTokenDispatcher" if "-flex-" in name else "MoEAlltoAllTokenDispatcher"
        assert facts_of(work, name)["dispatchers"] == [[dispatcher, True]]
    assert facts_of(work, name)["kernels"].startswith("transformer_engine.")


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("gated", "latent", "mtp"))])
def test_shared_experts_run_beside_exchanges_where_experts_have_buffers_of_their_own(name: str, work: Path) -> None:
    te, plain = facts_of(work, name)["overlapped"]
    assert set(te) <= {name in NAMES[2] and "ep_size" in name and "adapters" not in name}
    assert not any(plain)
    assert te or name.startswith("mtp"), "no layer has shared experts"


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names if SHARED in name])
def test_common_beginnings_are_read_once(name: str, work: Path) -> None:
    read, all_tokens = facts_of(work, name)["read"]
    assert read < 0.8 * all_tokens


def test_selective_keeps_no_outputs_of_norms_and_swiglu(work: Path) -> None:
    """By the bytes that the estimate of memory says, which has no other figure for Transformer Engine's layers."""
    model, engine = read_config(str(work / "qwen3" / "model")), EngineConfig(dtype="float32", backend="te")
    kept = {
        recompute: LayerBytes.of(model, ParallelConfig(), replace(engine, recompute=recompute), on_gpu=True).kept
        for recompute in ("none", "selective")
    }
    tokens = int(load_file(work / "qwen3" / "batch.safetensors")["cu_seqlens"][-1]) * model.num_hidden_layers
    spared = facts_of(work, "qwen3-none-")["kept"] - facts_of(work, "qwen3-selective-")["kept"]
    assert spared == tokens * (kept["none"] - kept["selective"]) > 0


@pytest.mark.parametrize("name", ["qwen3-offloaded-", f"latent-{LATE}-"])
def test_only_the_first_layers_are_offloaded(name: str, work: Path) -> None:
    first, second = facts_of(work, name)["offloaded"]
    assert first > 0
    assert second == 0


@pytest.mark.parametrize("name", [name for name in NAMES[1] if name in DENSE])
def test_te_equals_transformers(name: str, work: Path) -> None:
    model_name = name.split("-")[0]
    batch = load_file(work / model_name / "batch.safetensors")
    model = AutoModelForCausalLM.from_pretrained(work / model_name / "model")
    out = load_file(work / name / "out.safetensors")
    with torch.no_grad():
        logprobs, _ = reference_logprobs(model, batch)
    torch.testing.assert_close(out["logprobs"], logprobs, atol=1e-5, rtol=0)
    steps, gradients = reference_steps(model, batch)
    for step, (loss, norm) in zip(facts_of(work, name)["stats"], steps, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=5e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=5e-5)
    for tensor, gradient in gradients.items():
        difference = (out[f"gradient.{tensor}"] - gradient).abs().max() / gradient.abs().max()
        assert difference <= 1e-4, f"gradient of {tensor}: {difference}"
        torch.testing.assert_close(out[f"after.{tensor}"], model.state_dict()[tensor], atol=1e-5, rtol=0, msg=tensor)


EXPERTS_OVER_RANKS = [name for ranks in (2, 4) for name in NAMES[ranks] if name.startswith("mixtral")]


@pytest.mark.parametrize("name", [name for name in EXPERTS_OVER_RANKS if SHARED not in name])  # on another batch
def test_experts_over_ranks_have_the_norm_of_one_process(name: str, work: Path) -> None:
    """The norm decides how far gradients are clipped, so the weights after a step agree as well."""
    single = "mixtral-selective-"
    for step, alone in zip(*(facts_of(work, n)["stats"] for n in (name, single)), strict=True):
        assert alone["grad_norm"] > 1.0, "nothing is clipped"
        assert step["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    out, expected = (load_file(work / n / "out.safetensors") for n in (name, single))
    for tensor in expected:
        if tensor.startswith(("first.", "after.")):
            torch.testing.assert_close(out[tensor], expected[tensor], atol=1e-5, rtol=0, msg=tensor)


def test_megatron_marks_experts_that_transformer_engine_leaves_unmarked(work: Path) -> None:
    """Transformer Engine does so from 2.13 on. Without any mark, only the first rank of each etp group would count."""
    norms = facts_of(work, MARKS)["norms"]
    alone = facts_of(work, "mixtral-selective-")["stats"][0]["grad_norm"]
    assert norms["both"] == pytest.approx(alone, rel=1e-5)
    assert norms["Megatron"] == pytest.approx(alone, rel=1e-5)
    assert norms["nobody"] < 0.99 * alone
