"""Each fusion of the backend `te`, off and on, gives the results of `torch`, on the stand-in of Transformer Engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from megarl.actor.model.moe import moe_fields
from megarl.families import decoder, read_config
from megarl.types import ROUTED_EXPERTS
from tests import rows
from tests.distributed.test_layouts import make_batch
from tests.distributed.test_replayed_experts import made_routes
from tests.te.test_stand_in import SP, TIMEOUT, run_cases

MODELS: dict[str, dict[str, Any]] = {  # by how routers score: softmax of all experts, of the chosen ones, or sigmoid
    "softmax": {"family": "qwen3_moe", "norm_topk_prob": False, "mlp_only_layers": [1]},
    "chosen": {"family": "mixtral"},
    "biased": {"family": "gpt_oss"},
    "sigmoid": {"family": "deepseek_v3"},  # with groups, a bias of the choice, a shared expert, and a dense layer
    "gated": {"family": "qwen3_next"},
}
EXPERTS = ("permutation", "routing")
DENSE = ("norm and projection", "SwiGLU", "rotary positions", "accumulation")
# Fields that `te` sets to True, with the fusion that the table turns off for each
FIELDS = {
    "apply_rope_fusion": "rotary positions",
    "bias_activation_fusion": "SwiGLU",
    "fused_permutation": "permutation",
    "fused_routing": "routing",
    "overlaps_shared_experts": "shared experts",
}
EP2 = {"dp_size": 2, "ep_size": 2}
FLEX = {"moe_dispatcher": "flex"}
BLOCKWISE = {"dtype": "bfloat16", "fp8": "blockwise"}
Case = tuple[int, str, dict[str, Any], dict[str, Any], tuple[str, ...]]
# Ranks, model, layout, knobs of `te`, and what is turned off.
CASES: dict[str, Case] = rows.only("softmax,sigmoid,padded,ep2,replayed", {
    "softmax": (1, "softmax", {}, {}, (*DENSE, *EXPERTS, "grouped experts")),
    "biased": (1, "biased", {}, {}, ("routing",)),
    "sigmoid": (1, "sigmoid", {}, {}, ("routing",)),
    "padded": (1, "chosen", {}, BLOCKWISE, ("permutation",)),  # rows of an expert are filled up to a block of FP8
    "etp2": (2, "sigmoid", SP, {}, ("permutation",)),
    "ep2": (2, "sigmoid", EP2, {}, (*EXPERTS, "shared experts")),
    "flex": (2, "gated", {**SP, "ep_size": 2, "etp_size": 1}, FLEX, ("permutation", "shared experts")),
    "replayed": (2, "sigmoid", {**SP, "ep_size": 2, "etp_size": 1}, {"recompute": "full"}, ("permutation",)),
})  # fmt: skip
NAN = ("softmax", "sigmoid")  # cases in which a token is NaN
RUNS = [(name, off) for name, case in CASES.items() for off in ("", *case[4])]


pytestmark = [*rows.marks(), TIMEOUT]


@pytest.fixture(scope="module")
def work(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases once, and returns the folder with their facts."""
    folder = tmp_path_factory.mktemp("fusions")
    for name, fields in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(checkpoints(tied=False, **fields))
        model = decoder(read_config(str(folder / name / "model")))
        assert model.experts is not None
        batch = make_batch(343)
        batch[ROUTED_EXPERTS] = made_routes(sum(model.sparse), model.experts.count, model.experts.topk)
        save_file(batch, folder / name / "batch.safetensors")
    cases: dict[str, list[dict[str, Any]]] = {"1": [], "2": []}
    for name, (ranks, model_name, layout, knobs, off) in CASES.items():
        case = {"name": name, "model": model_name, "layout": layout, "knobs": knobs, "off": off}
        case |= {"reference": "te" if "fp8" in knobs else "torch", "replays": name == "replayed"}
        cases[str(ranks)].append({**case, "nan": name in NAN})
    run_cases("tests.te.fusions_worker", folder, cases)
    return folder


def facts_of(work: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return facts


@pytest.mark.parametrize(("name", "off"), RUNS)
def test_results_are_the_same_with_the_fusion_and_without(name: str, off: str, work: Path) -> None:
    """Log-probs, the gradient's norm, and gradients relative to a tensor's largest."""
    errors = facts_of(work, name)["runs"][off]["errors"]
    assert set(errors) == {"logprobs", "gradient"}
    assert {kind: error for kind, error in errors.items() if not error <= 1e-5} == {}


@pytest.mark.parametrize("name", CASES)
def test_layers_and_kernels_are_those_of_the_fusions_that_are_on(name: str, work: Path) -> None:
    facts = facts_of(work, name)
    on = {*CASES[name][4]} - ({"routing"} if name == "replayed" else set())
    for off in ("", *CASES[name][4]):
        signs = facts["runs"][off]["signs"]
        assert {fusion for fusion in on if signs[fusion]} == on - {off}


def test_the_table_turns_off_all_that_the_backend_turns_on(work: Path) -> None:
    assert set(facts_of(work, "softmax")["fields"]) == set(FIELDS)
    turned_off = {fusion for case in CASES.values() for fusion in case[4]}
    assert set(FIELDS.values()) <= turned_off


def test_routers_with_a_replayed_choice_are_not_fused(work: Path) -> None:
    facts = facts_of(work, "replayed")
    assert "fused_routing" not in facts["fields"]
    assert not any(run["signs"]["routing"] for run in facts["runs"].values())


@pytest.mark.parametrize("name", NAN)
def test_a_step_with_nan_is_left_out_though_the_kernel_repeats_an_expert(name: str, work: Path) -> None:
    facts = facts_of(work, name)
    assert facts["experts_of_nan"] == 1
    assert facts["skipped"] == 1.0


@pytest.mark.parametrize(("experts", "fused"), [(128, True), (945, True), (946, False)])
def test_routing_is_fused_where_its_backward_pass_fits_into_shared_memory(experts: int, fused: bool) -> None:
    model = decoder(Qwen3MoeConfig(num_experts=experts, architectures=["Qwen3MoeForCausalLM"]))
    options = {"dispatcher": "alltoall", "grouped": True, "fused_permutation": True, "overlapped": False}
    assert moe_fields(model, **options, fused_routing=True)["moe_router_fusion"] is fused
    assert moe_fields(model, **options, fused_routing=False)["moe_router_fusion"] is False
