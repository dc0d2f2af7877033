"""The layout audit: each finding in Megatron's own code, megarl's side of it, and bugs planted in megarl's layouts.

`docs/layout_audit.md` is the table. A test that fails after a new Megatron says that a finding is mended there.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl.launcher.local import run_ranks
from megarl.preflight import invariance
from tests.distributed import layout_audit_worker, layout_controls_worker
from tests.distributed.layout_controls_worker import CONTROLS

PAGE = Path(__file__).parents[2] / "docs" / "layout_audit.md"
Figures = dict[str, list[dict[str, Any]]]  # by finding: one entry a rank, tp neighbours first


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    work = tmp_path_factory.mktemp("audit")
    assert run_ranks("tests.distributed.layout_audit_worker", [str(work / "figures.json")], 4, work) == 0, logs(work)
    return json.loads((work / "figures.json").read_text())


def logs(work: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in work.glob("*.log"))


def test_smoothed_labels_depend_on_tp_and_megarls_log_probs_do_not(figures: Figures) -> None:
    ranks = figures["label_smoothing"]
    for rank in ranks:
        assert rank["megatron"] != pytest.approx(rank["dense"], rel=1e-3)
        assert rank["unsmoothed"] == pytest.approx(rank["dense_unsmoothed"], rel=1e-5)
        assert rank["megarl"] == pytest.approx(rank["dense_unsmoothed"], rel=1e-5)
    assert ranks[0]["megatron"] != pytest.approx(ranks[1]["megatron"], rel=1e-3)


def test_the_loss_on_gathered_logits_is_too_large_by_the_log_of_tp(figures: Figures) -> None:
    for rank in figures["gathered_logits"]:
        differences = [a - b for a, b in zip(rank["gathered"], rank["sharded"], strict=True)]
        assert differences == pytest.approx([math.log(2)] * layout_audit_worker.TOKENS, abs=1e-5)


def test_the_mtp_gradient_depends_on_how_tokens_lie_on_dp_ranks(figures: Figures) -> None:
    for rank in figures["mtp_token_counts"]:
        assert rank["megatron"] == pytest.approx(5.0, rel=1e-5)
        assert rank["per_token"] == 5.5


@pytest.mark.parametrize("finding", ["saved_activations", "padding_mask", "latent_projection", "image_embeddings"])
def test_megatron_takes_its_global_group_for_the_modules(finding: str, figures: Figures) -> None:
    """On the ranks where both groups give a rank the same place and neighbour, the result is right by chance."""
    assert any(rank["megatron"] != rank["right"] for rank in figures[finding])


def test_sinks_without_mark_are_missing_in_the_gradient_norm(figures: Figures) -> None:
    for rank in figures["attention_sinks"]:
        assert rank["megatron"] == pytest.approx(math.sqrt(1 + 4))
        assert rank["marked"] == pytest.approx(rank["right"])


def test_mla_under_tp_alone_has_two_wrong_gradients(figures: Figures) -> None:
    """The query's norm is summed over tp though it is complete, the shared part of the key is not though it is not."""
    for index, rank in enumerate(figures["latent_gradients"]):
        norm, part = rank["norm"], rank["rotary_key" if index % 2 else "latent"]
        assert norm["before"] == pytest.approx(norm["right"], rel=1e-2)
        assert norm["megatron"] == pytest.approx(2 * norm["right"], rel=1e-2)
        is_right = part["megatron"] == pytest.approx(part["right"], rel=1e-2)
        assert is_right == (index % 2 == 0)


def test_the_routers_local_count_is_the_groups(figures: Figures) -> None:
    for rank in figures["router_counts"]:
        assert rank["megatron"] == rank["total"] == 4.0
        assert rank["right"] in (1.0, 3.0)


def test_delta_nets_output_norm_keeps_a_partial_gradient(figures: Figures) -> None:
    for rank in figures["delta_norm"]:
        assert rank["q_layernorm"] == pytest.approx(rank["complete"], rel=1e-5)
        assert rank["out_norm"] != pytest.approx(rank["complete"], rel=1e-2)
    both = [a["out_norm"] for a in figures["delta_norm"][:2]]
    assert [a + b for a, b in zip(*both, strict=True)] == pytest.approx(figures["delta_norm"][0]["complete"], rel=1e-5)


def test_stages_number_their_layers_from_zero_and_megarls_shards_do_not(figures: Figures) -> None:
    for rank in figures["layer_names"]:
        assert rank["megatron"] == [0, 1]
        assert rank["megarl"] == [2 * rank["stage"], 2 * rank["stage"] + 1]


def test_what_earlier_megatrons_had_wrong_is_mended(figures: Figures) -> None:
    for rank in figures["expert_norm"]:
        assert rank["megatron"] == pytest.approx(rank["right"])
        assert rank["before"] < 0.5 * rank["right"]
    for rank in figures["strided_sum"]:
        assert rank["megatron"] == rank["right"]


def test_a_step_of_megarl_takes_none_of_the_paths(figures: Figures) -> None:
    for rank in figures["megarl_paths"]:
        assert rank["called"] == []
        assert rank["control"] == ["scatter without group", "vocab_parallel_cross_entropy"]
        assert rank["is_finite"]
        assert rank["is_global"], "a module's group is not Megatron's global one: findings 4 to 7 would reach it"
        assert rank["mtp_layers"] is None
        assert not rank["splits_saved_activations"]
        assert rank["router_losses"] == ["none", None]


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("controls")
    for name, config in invariance.MODELS.items():
        config.save_pretrained(work / name)
    for world in (1, 2):
        arguments = [str(work), str(world)]
        assert run_ranks("tests.distributed.layout_controls_worker", arguments, world, work) == 0, logs(work)
    return work


@pytest.mark.parametrize("control", [name for name in CONTROLS if not name.startswith("none")])
def test_check_invariance_notices_a_planted_layout_bug(control: str, controls: Path) -> None:
    model = invariance.CASES[CONTROLS[control][0]].model
    expected = load_file(controls / ("none.safetensors" if model == "dense" else "none, moe.safetensors"))
    found = load_file(controls / f"{control}.safetensors")
    difference = {
        name: float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in found
    }
    assert not invariance.holds(difference), difference
    assert difference["grad_norm"] > 10 * invariance.TOLERANCE


def test_the_page_names_the_tests_and_the_controls() -> None:
    page = PAGE.read_text()
    tests = {name for name in globals() if name.startswith("test_")}
    named = set(re.findall(r"`(test_\w+)`", page))
    assert named & tests == tests - {"test_the_page_names_the_tests_and_the_controls"}
    assert all(control in page for control in CONTROLS if not control.startswith("none"))
    assert layout_controls_worker.ranks_of("none") == 1
