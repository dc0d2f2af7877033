"""Given experts are computed as in transformers with the same ones: gpt-oss, Qwen3-Next and Qwen3.5, every layout.

SGLang serves these models on GPUs alone, so the routes are made: experts at random, which no router would choose.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.types import ROUTED_EXPERTS
from tests import rows
from tests.distributed.layout_worker import ENTROPY_BONUS
from tests.distributed.replayed_experts_worker import ADAM
from tests.distributed.test_delta_net_layouts import on_disk
from tests.distributed.test_layouts import LENGTHS, SP, make_batch, reference_logprobs, run_world

pytestmark = rows.marks()
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {  # by world size; all of them recompute in backward
    1: {"tp1": {}},
    2: {
        "tp2sp": SP,
        "ep2": {"dp_size": 2, "ep_size": 2},
        "tp2sp_ep2": {**SP, "ep_size": 2, "etp_size": 1},
        "pp2": {"pp_size": 2},
        "cp2": {"cp_size": 2},
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"family": "gpt_oss", "vocab_size": 343, "num_local_experts": 8, "num_experts_per_tok": 3},
    "qwen3_next": {  # the second layer has no experts, and the weights of a token's experts do not sum to 1
        "family": "qwen3_next", "vocab_size": 341, "mlp_only_layers": [1], "norm_topk_prob": False,
    },
    "qwen3_5_moe": {"family": "qwen3_5_moe_text", "vocab_size": 347},
}  # fmt: skip
RUNS = rows.diagonal({  # experts with biases take no tensor parallelism of their own
    layout: [name for name in MODELS if (name, layout) != ("gpt_oss", "tp2sp")]
    for layouts in LAYOUTS.values()
    for layout in layouts
})  # fmt: skip
CASES = [
    pytest.param(size, layout, name, marks=[pytest.mark.long] if size == 1 else [], id=f"{size}-{layout}-{name}")
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    for name in RUNS[layout]
]


def made_routes(layers: int, experts: int, topk: int) -> Tensor:
    """Draws routes; the last token of each sequence has none."""
    total, generator = int(LENGTHS.sum()), torch.Generator().manual_seed(layers)
    routes = torch.rand(total, layers, experts, generator=generator).argsort(-1)[..., :topk].to(torch.int16)
    routes[LENGTHS.cumsum(0) - 1] = -1
    return routes


def force(model: Any, routes: Tensor) -> list[Tensor]:
    """Has the routers of a transformers model take given experts, for sequences that it reads one at a time.

    Returns a list that grows: by sequence and layer, True for tokens whose router would have chosen otherwise.
    """
    changed: list[Tensor] = []
    config, routers = model.config, [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    assert len(routers) == routes.shape[1]
    for layer, router in enumerate(routers):
        sequences = itertools.cycle(routes[:, layer].long().split(LENGTHS.tolist()))

        def forced(_: Any, __: Any, output: Any, sequences: Any = sequences) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, own = output
            given = next(sequences)
            experts = torch.where(given >= 0, given, own)
            changed.append((experts.sort(-1).values != own.sort(-1).values).any(-1)[given[:, 0] >= 0])
            if config.model_type == "gpt_oss":
                return logits, logits.gather(1, experts).softmax(-1), experts
            weights = logits.softmax(-1).gather(1, experts)
            if getattr(config, "norm_topk_prob", True):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, experts

        router.register_forward_hook(forced)
    return changed


@pytest.fixture(scope="module")
def cases(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By model: its folder, its batch, and the results of transformers with the batch's experts."""
    result = {}
    for name, fields in MODELS.items():
        folder = checkpoints(num_hidden_layers=4, tied=False, attn_implementation="eager", **fields)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        config, batch = model.config, make_batch(fields["vocab_size"])
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        layers = 4 - len(getattr(config, "mlp_only_layers", None) or ())
        batch[ROUTED_EXPERTS] = made_routes(layers, experts, config.num_experts_per_tok)
        changed = force(model, batch[ROUTED_EXPERTS])
        optimizer = torch.optim.AdamW(model.parameters(), lr=ADAM["lr"], eps=ADAM["adam_eps"], weight_decay=0.0)
        logprobs, entropy = reference_logprobs(model, batch)
        share = float(torch.cat(changed).double().mean())
        mask = batch["loss_mask"]
        loss = -((logprobs * batch["advantages"] + ENTROPY_BONUS * entropy) * mask).sum() / mask.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        with torch.no_grad():
            after, _ = reference_logprobs(model, batch)
        result[name] = {
            "folder": folder, "batch": batch, "before": logprobs.detach(), "after": after, "loss": loss.item(),
            "norm": norm.item(), "changed": share,
            "gradients": on_disk(model, gradients, tmp_path_factory.mktemp("gradients")),
        }  # fmt: skip
    return result


@pytest.fixture(scope="module")
def world(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`world(ranks)` runs all layouts of that many ranks, once, and returns the folder with their results."""
    return functools.cache(
        lambda ranks: run_world(ranks, cases, tmp_path_factory, LAYOUTS[ranks], RUNS, "replayed_experts_worker")
    )


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_given_experts_are_computed_as_in_transformers(
    ranks: int, layout: str, name: str, cases: dict[str, dict[str, Any]], world: Callable[[int], Path]
) -> None:
    case, folder = cases[name], world(ranks) / name / layout
    out, stats = load_file(folder / "out.safetensors"), json.loads((folder / "stats.json").read_text())
    given = case["batch"][ROUTED_EXPERTS].sort(-1).values
    routed = given[..., 0] >= 0
    assert torch.equal(out["replayed"][routed], given[routed])
    assert float((out["own"] != given).any(-1)[routed].float().mean()) > 0.5
    assert stats["routes_changed"] == pytest.approx(case["changed"], rel=1e-9)
    torch.testing.assert_close(out["before"], case["before"], atol=1e-5, rtol=0)
    moved = float((case["after"] - case["before"]).abs().max())  # the step carries on the gradients' rounding
    torch.testing.assert_close(out["after"], case["after"], atol=max(1e-5, 5e-5 * moved), rtol=0)
    assert (out["after"] - out["before"]).abs().max() > 1e-3
    assert stats["loss"] == pytest.approx(case["loss"], rel=5e-5, abs=1e-6)
    assert stats["grad_norm"] == pytest.approx(case["norm"], rel=1e-4)
    for tensor, gradient in case["gradients"].items():
        difference = (out[f"gradient.{tensor}"] - gradient).abs().max() / gradient.abs().max()
        assert difference <= 2e-4, f"gradient of {tensor}: {difference}"
