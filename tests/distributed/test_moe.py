"""Mixtures of experts equal transformers in fp32, for every expert layout: log-probs, steps, weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.launcher.local import run_ranks
from tests import rows
from tests.distributed.layout_worker import ADAM, ENTROPY_BONUS
from tests.distributed.moe_worker import ALONE
from tests.distributed.test_layouts import LENGTHS, make_batch, reference_logprobs

pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by world size; all layouts of a size run in the same processes
    1: {"ep1": {}},
    2: rows.only("etp2,tp2sp_ep2,pp2,cp2_ep2", {
        "ep2": {"dp_size": 2, "ep_size": 2},
        "etp2": {"dp_size": 2, "etp_size": 2},
        "tp2sp": {"tp_size": 2, "sequence_parallel": True},
        "tp2sp_ep2": {"tp_size": 2, "sequence_parallel": True, "ep_size": 2, "etp_size": 1},
        "pp2": {"pp_size": 2},
        "cp2_ep2": {"cp_size": 2, "ep_size": 2},
    }),
    4: {
        "pp2_ep2": {"pp_size": 2, "dp_size": 2, "ep_size": 2},
        "pp2vpp2_ep2": {"pp_size": 2, "vpp_size": 2, "dp_size": 2, "ep_size": 2},
        "tp2sp_ep2_dp2": {"tp_size": 2, "sequence_parallel": True, "dp_size": 2, "ep_size": 2},
        "ep2_etp2": {"dp_size": 4, "ep_size": 2, "etp_size": 2},
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = rows.only("qwen3_moe_mixed,deepseek_v3", {
    "mixtral": {"family": "mixtral", "tied": False, "vocab_size": 343, "num_hidden_layers": 4},
    "qwen3_moe_mixed": {  # dense and sparse layers, weights that do not sum to 1, biases, tied embeddings
        "family": "qwen3_moe", "tied": True, "vocab_size": 341, "num_hidden_layers": 4, "mlp_only_layers": [2],
        "decoder_sparse_step": 1, "norm_topk_prob": False, "attention_bias": True, "num_experts_per_tok": 3,
    },
    "deepseek_v3": {"family": "deepseek_v3", "tied": False, "vocab_size": 343, "num_hidden_layers": 4},
    "moonlight": {  # queries without a latent vector, several shared experts, no groups
        "family": "deepseek_v3", "tied": True, "vocab_size": 341, "num_hidden_layers": 4, "q_lora_rank": None,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    },
    "glm4_moe": {"family": "glm4_moe", "tied": False, "vocab_size": 343, "num_hidden_layers": 4},
})  # fmt: skip
CASES = [(world, layout) for world, layouts in LAYOUTS.items() for layout in layouts if rows.wants_all() or world < 4]


def selected(batch: dict[str, Tensor], sequence: int) -> dict[str, Tensor]:
    """Selects the per-token tensors of one sequence."""
    parts = {k: v.split(LENGTHS.tolist())[sequence] for k, v in batch.items() if k != "cu_seqlens"}
    return parts | {"cu_seqlens": torch.tensor([0, int(LENGTHS[sequence])])}


def reference_steps(model: Any, batch: dict[str, Tensor]) -> list[tuple[float, float]]:
    """Trains the model in place, as the worker does. Returns each step's loss and gradient norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
    steps = []
    for part in (batch, batch, selected(batch, ALONE)):
        lengths = part["cu_seqlens"].diff()
        logprobs, entropy = reference_logprobs(model, part, lengths)
        mask = part["loss_mask"]
        loss = -((logprobs * part["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, and the results of transformers. Tensors have their names on disk."""
    result = {}
    for name, fields in MODELS.items():
        folder = checkpoints(**fields)
        batch = make_batch(fields["vocab_size"])
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, batch)
        steps = reference_steps(model, batch)
        trained = tmp_path_factory.mktemp("trained")
        model.save_pretrained(trained)
        result[name] = {
            "folder": folder, "batch": batch, "logprobs": logprobs, "steps": steps,
            "weights": load_file(folder / "model.safetensors"), "trained": load_file(trained / "model.safetensors"),
        }  # fmt: skip
    return result


@pytest.fixture(scope="module")
def worlds(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`worlds(ranks)` runs all models and layouts of that many ranks, once, and returns the folder of results."""
    cache: dict[int, tuple[Path, str]] = {}  # folder, and the logs of a failure

    def run(world: int) -> Path:
        if world not in cache:
            work, logs = tmp_path_factory.mktemp(f"world{world}"), tmp_path_factory.mktemp("logs")
            for name, case in cases.items():
                (work / name).mkdir()
                (work / name / "model").symlink_to(case["folder"])
                save_file(case["batch"], work / name / "batch.safetensors")
            arguments = [str(work), json.dumps(LAYOUTS[world])]
            code = run_ranks("tests.distributed.moe_worker", arguments, world, logs)
            cache[world] = work, "\n".join(p.read_text()[-3000:] for p in logs.iterdir()) if code else ""
        work, failure = cache[world]
        assert not failure, failure
        return work

    return run


@pytest.mark.parametrize(("world", "layout"), CASES, ids=[layout for _, layout in CASES])
@pytest.mark.parametrize("name", MODELS)
def test_experts_agree_with_transformers(
    name: str, world: int, layout: str, worlds: Callable[[int], Path], cases: dict[str, dict[str, Any]]
) -> None:
    case, folder = cases[name], worlds(world) / name / layout
    out = load_file(folder / "out.safetensors")
    torch.testing.assert_close(out["logprobs"], case["logprobs"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out["one_by_one"], out["logprobs"], atol=1e-5, rtol=0)
    assert torch.equal(out["again"], out["logprobs"])
    for step, (loss, norm) in zip(json.loads((folder / "stats.json").read_text()), case["steps"], strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)

    assert {n.removeprefix("before.") for n in out if n.startswith("before.")} == set(case["weights"])
    for tensor, weight in case["weights"].items():
        assert torch.equal(out[f"before.{tensor}"], weight), tensor
        torch.testing.assert_close(out[f"after.{tensor}"], case["trained"][tensor], atol=1e-5, rtol=0, msg=tensor)
    exported = load_file(folder / "exported" / "model.safetensors")
    assert exported.keys() == case["weights"].keys()
    assert all(torch.equal(exported[tensor], out[f"after.{tensor}"]) for tensor in exported)


def test_transformers_loads_an_export(worlds: Callable[[int], Path], cases: dict[str, dict[str, Any]]) -> None:
    for name, case in cases.items():
        model = AutoModelForCausalLM.from_pretrained(worlds(1) / name / "ep1" / "exported")
        with torch.no_grad():
            logprobs, _ = reference_logprobs(model, case["batch"])
        assert math.isfinite(float(logprobs.sum()))
        assert not torch.allclose(logprobs, case["logprobs"], atol=1e-3)  # it was trained
