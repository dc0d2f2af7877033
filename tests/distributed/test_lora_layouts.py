"""Adapters equal a reference in fp32 on every layout: log-probs, three steps, merged weights, PEFT's files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.actor.weights.peft_files import PREFIX, WEIGHTS, write
from megarl.actor.weights.quantised import rounded
from megarl.actor.weights.shards import tensor_shapes
from megarl.families import Adapters, read_config, with_adapters
from megarl.families.adapters import ALL_LINEAR, EVERY_LINEAR, LORA_A, LORA_B
from megarl.launcher.local import run_ranks
from tests import rows
from tests.distributed.layout_worker import ADAM, ENTROPY_BONUS
from tests.distributed.lora_worker import ALPHA, RANK, STEPS
from tests.distributed.test_layouts import make_batch, reference_logprobs

ADAPTERS = Adapters(RANK, (ALL_LINEAR,), ALPHA)
SP = {"tp_size": 2, "sequence_parallel": True}
EXPERTS = {"etp_size": 1}
pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"tp1": {}},
    2: {
        "tp2": {"tp_size": 2},
        "tp2sp": SP,
        "pp2": {"pp_size": 2},
        "cp2": {"cp_size": 2},
        "dp2": {"dp_size": 2},
        "ep2": {"dp_size": 2, "ep_size": 2, **EXPERTS},
        "tp2sp_ep2": {**SP, "ep_size": 2, **EXPERTS},
        "etp2": {**SP, "etp_size": 2},
    },
    4: {"tp2sp_pp2": {**SP, "pp_size": 2}},
}
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "head_dim": 16}
LATENT_BLOCKS = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "tied": True, "vocab_size": 341},
    "qwen2_recomputed": {"family": "qwen2", "tied": False, "vocab_size": 343},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False, "vocab_size": 352},
    "deepseek_v3": {"family": "deepseek_v3", "tied": False, "vocab_size": 352},
    "qwen2_dropout": {"family": "qwen2", "tied": False, "vocab_size": 343},
    "one_key_head": {"family": "qwen3", "tied": False, "vocab_size": 343, "num_key_value_heads": 1},
    "grouped_experts": {"family": "qwen3_moe", "tied": False, "vocab_size": 352},
    "nf4": {"family": "qwen3", "tied": True, "vocab_size": 341, **BLOCKS},
    "nf4_experts": {"family": "deepseek_v3", "tied": False, "vocab_size": 352, **LATENT_BLOCKS},
    "blockwise8": {"family": "qwen2", "tied": False, "vocab_size": 343, **BLOCKS},
}
# Knobs of the engine beside the layouts; 8-bit and 4-bit rows need blocks of 64 columns on each of two ranks.
KNOBS: dict[str, dict[str, Any]] = {
    "qwen2_recomputed": {"recompute": "full"},
    "qwen2_dropout": {"recompute": "full", "lora": {"dropout": 0.3}},
    "grouped_experts": {"experts": "grouped"},
    "nf4": {"lora": {"quantization": "nf4"}},
    "nf4_experts": {"lora": {"quantization": "nf4"}, "recompute": "full"},
    "blockwise8": {"lora": {"quantization": "blockwise8"}},
}
# The layouts of each model, tp1 first: the others load its state.
ALL_RUNS: dict[str, tuple[str, ...]] = {
    "qwen3": ("tp1", "tp2", "tp2sp", "pp2", "cp2", "dp2", "tp2sp_pp2"),
    "qwen2_recomputed": ("tp1", "tp2sp", "pp2"),
    "qwen3_moe": ("tp1", "pp2", "cp2", "ep2", "tp2sp_ep2", "etp2"),
    "deepseek_v3": ("tp1", "pp2", "tp2sp_ep2", "etp2"),
    "qwen2_dropout": ("tp1", "tp2", "tp2sp", "dp2"),
    "one_key_head": ("tp1", "tp2", "tp2sp"),
    "grouped_experts": ("tp1", "pp2", "cp2", "ep2", "tp2sp_ep2", "etp2"),
    "nf4": ("tp1", "tp2", "tp2sp", "pp2", "cp2", "dp2", "tp2sp_pp2"),
    "nf4_experts": ("tp1", "pp2", "ep2", "tp2sp_ep2"),
    "blockwise8": ("tp1", "tp2"),
}
RUNS_OF: dict[str, tuple[str, ...]] = ALL_RUNS if rows.wants_all() else {
    "qwen3": ("tp1", "pp2"),
    "qwen2_dropout": ("tp1", "tp2sp"),
    "nf4_experts": ("tp1", "tp2sp_ep2"),
}  # fmt: skip
RUNS = {
    layout: [model for model, runs in RUNS_OF.items() if layout in runs]
    for layouts in LAYOUTS.values()
    for layout in layouts
}
CASES = [(size, layout, name) for size, layouts in LAYOUTS.items() for layout in layouts for name in RUNS[layout]]
MASKS_AGREE = {"tp2": (True, False), "tp2sp": (False, False), "dp2": (False, False)}  # of linear_qkv, linear_proj


def fused(name: str, tensors: dict[str, Tensor]) -> tuple[str, tuple[Any, ...]]:
    """Name and box of a checkpoint's tensor in transformers' model, which has the experts of a layer in one tensor."""
    if name in tensors or ".experts." not in name:
        return name, (slice(None),)
    block, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        return f"{block}.experts.down_proj", (int(expert),)
    width = tensors[f"{block}.experts.gate_up_proj"].shape[1] // 2
    rows = slice(0, width) if part == "gate_proj" else slice(width, 2 * width)
    return f"{block}.experts.gate_up_proj", (int(expert), rows)


def adapted(weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """W + scale B A of every weight with an adapter; the others as they are."""
    result = dict(weights)
    for name in [n.removesuffix(LORA_A) for n in adapters if n.endswith(LORA_A)]:
        target, box = fused(f"{name}.weight", weights)
        product = ALPHA / RANK * adapters[name + LORA_B] @ adapters[name + LORA_A]
        if result[target] is weights[target]:
            result[target] = weights[target].clone()
        result[target][box] = result[target][box] + product
    return result


class Reference:
    """transformers' model with adapters as leaves. Its linear layers may be rounded as a quantised base is."""

    def __init__(self, folder: Path, adapters: dict[str, Tensor], quantization: str = "none") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.weights = {k: v.detach() for k, v in self.model.named_parameters()}
        for name, shape in tensor_shapes(read_config(str(folder))).items():
            if quantization != "none" and EVERY_LINEAR.adapt(name, shape):
                target, box = fused(name, self.weights)
                self.weights[target][box] = rounded(self.weights[target][box], quantization)
        self.adapters = {name: tensor.clone().requires_grad_() for name, tensor in adapters.items()}

    def logprobs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights = adapted(self.weights, self.adapters)
        return reference_logprobs(lambda ids: torch.func.functional_call(self.model, weights, (ids,)), batch)

    def steps(self, batch: dict[str, Tensor]) -> list[tuple[float, float]]:
        """Trains; returns each step's loss and gradient norm."""
        parameters = list(self.adapters.values())
        optimizer = torch.optim.AdamW(parameters, lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
        results = []
        for _ in range(STEPS):
            logprobs, entropy = self.logprobs(batch)
            mask = batch["loss_mask"]
            loss = -((logprobs * batch["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            results.append((loss.item(), norm.item()))
        return results


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, its adapters, and the results of the reference."""
    result = {}
    for name in RUNS_OF:
        fields = MODELS[name]
        folder = checkpoints(num_hidden_layers=4, **fields)
        batch = make_batch(fields["vocab_size"])
        shapes = tensor_shapes(with_adapters(read_config(str(folder)), ADAPTERS))
        generator = torch.Generator().manual_seed(7)
        adapters = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        reference = Reference(folder, adapters, KNOBS.get(name, {}).get("lora", {}).get("quantization", "none"))
        with torch.no_grad():
            base, _ = reference_logprobs(reference.model, batch)
            logprobs, _ = reference.logprobs(batch)
        steps = reference.steps(batch)
        with torch.no_grad():
            trained, _ = reference.logprobs(batch)
        result[name] = {
            "folder": folder, "batch": batch, "adapters": adapters, "base": base, "logprobs": logprobs,
            "steps": steps, "trained": trained, "after": {k: v.detach() for k, v in reference.adapters.items()},
            "merged": {k: v.detach() for k, v in adapted(reference.weights, reference.adapters).items()},
        }  # fmt: skip
    return result


@pytest.fixture(scope="module")
def outputs(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what every layout computed; all layouts of a world size run in one start of its ranks."""
    work = tmp_path_factory.mktemp("lora")
    for name, case in cases.items():
        (work / name).mkdir()
        (work / name / "model").symlink_to(case["folder"])
        save_file(case["batch"], work / name / "batch.safetensors")
        write(work / name / "adapter", case["adapters"], ADAPTERS, 0.0, str(case["folder"]))
        (work / name / "knobs.json").write_text(json.dumps(KNOBS.get(name, {})))
    for size in sorted({size for size, _, _ in CASES}):
        layouts = {layout: knobs for layout, knobs in LAYOUTS[size].items() if RUNS[layout]}
        logs = work / f"logs_{size}"
        logs.mkdir()
        arguments = [str(work), json.dumps(layouts), json.dumps(RUNS)]
        code = run_ranks("tests.distributed.lora_worker", arguments, size, logs)
        assert not code, "\n".join(path.read_text()[-3000:] for path in logs.iterdir())
    return work


@pytest.mark.parametrize(("size", "layout", "name"), [case for case in CASES if case[2] != "qwen2_dropout"])
def test_adapters_equal_the_reference(
    size: int, layout: str, name: str, cases: dict[str, dict[str, Any]], outputs: Path
) -> None:
    case, out = cases[name], outputs / name / layout
    computed = load_file(out / "out.safetensors")
    stats = json.loads((out / "stats.json").read_text())
    assert torch.equal(computed["resumed"], computed["trained"])
    for key, expected in (("logprobs",) * 2, ("trained",) * 2, ("base",) * 2, ("from_tp1", "trained")):
        torch.testing.assert_close(computed[key], case[expected], atol=1e-5, rtol=0)
    for step, (loss, norm) in zip(stats, case["steps"], strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
    loaded = load_file(out / "loaded" / WEIGHTS)
    assert {key: tensor.tolist() for key, tensor in loaded.items()} == {
        PREFIX + key: tensor.tolist() for key, tensor in case["adapters"].items()
    }
    trained = load_file(out / "trained" / WEIGHTS)
    for key, tensor in case["after"].items():
        torch.testing.assert_close(trained[PREFIX + key], tensor, atol=1e-5, rtol=0)
    merged = {key.removeprefix("merged."): t for key, t in computed.items() if key.startswith("merged.")}
    for key, tensor in merged.items():
        target, box = fused(key, case["merged"])
        if target in case["merged"]:  # not the bias of an expert's choice, a buffer
            torch.testing.assert_close(tensor, case["merged"][target][box], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", RUNS_OF["qwen2_dropout"])
def test_dropout_is_drawn_again_and_never_when_evaluated(
    layout: str, cases: dict[str, dict[str, Any]], outputs: Path
) -> None:
    case, out = cases["qwen2_dropout"], outputs / "qwen2_dropout" / layout
    computed, stats = load_file(out / "out.safetensors"), json.loads((out / "stats.json").read_text())
    assert torch.equal(computed["resumed"], computed["trained"])
    for key in ("logprobs", "base"):
        torch.testing.assert_close(computed[key], case[key], atol=1e-5, rtol=0)
    assert abs(stats[0]["loss"] - case["steps"][0][0]) > 1e-4


@pytest.mark.parametrize("layout", [layout for layout in MASKS_AGREE if layout in RUNS_OF["qwen2_dropout"]])
def test_ranks_with_the_same_input_drop_the_same_and_others_their_own(layout: str, outputs: Path) -> None:
    first, second = (
        json.loads((outputs / "qwen2_dropout" / layout / f"rank_{rank}.json").read_text()) for rank in (0, 1)
    )
    agree = tuple(first["masks"][kind] == second["masks"][kind] for kind in ("linear_qkv", "linear_proj"))
    assert agree == MASKS_AGREE[layout]
    common = first["boxes"].keys() & second["boxes"].keys()
    assert len(common) >= 8
    assert all(first["boxes"][box] == second["boxes"][box] for box in common)
