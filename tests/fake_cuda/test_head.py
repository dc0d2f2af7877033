"""The LM head of a large model on the device: memory, products and launches of every route, without values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from head import TOKENS, VOCAB  # noqa: E402
from run_cases import Case, DeviceProcess, Outcomes, result  # noqa: E402

from megarl.ops.head_chunks import divergence_bytes  # noqa: E402
from tests import rows  # noqa: E402

pytestmark = rows.marks()

# Routes through the LM head -> most memory as a share of the logits, and products of 2 T V H operations.
HEAD = {
    "token loss": (0.10, 3),
    "token loss, main gradient": (0.10, 3),
    "told gradients, main gradient": (0.10, 3),
    "told gradients, frozen head": (0.10, 2),  # of multi-token prediction
    "log-probs, frozen head": (0.10, 3),
    "log-probs": (0.10, 4),
    "log-probs, main gradient": (0.10, 4),
    "token loss, sums in float32": (0.51, 3),
    "all logits": (1.01, 3),
    "divergence, main gradient": (0.44, 6),
    "divergence of a mean, main gradient": (0.60, 6),
    "divergence of the top k, main gradient": (0.28, 4),
}
RARER = {"log-probs", "told gradients, main gradient", "log-probs, frozen head", "all logits"}
ROUTES = [route for route in HEAD if rows.wants_all() or route not in RARER]


@pytest.fixture(scope="module")
def outcomes(process: DeviceProcess) -> Outcomes:
    cases: dict[str, Case] = {route: ("head", {"route": route}, {}) for route in ROUTES}
    cases["fewer tokens"] = "head", {"route": "token loss", "tokens": 8192}, {}
    return Outcomes(process, cases)


@pytest.mark.parametrize("route", ROUTES)
def test_the_head_of_a_large_model_takes_a_tenth_of_its_logits_memory(outcomes: Any, route: str) -> None:
    found, (share, products) = result(outcomes, route), HEAD[route]
    assert 0.9 * share - 0.04 < found["share"] <= share
    assert found["products"] == pytest.approx(products)


@pytest.mark.parametrize(
    ("route", "top_k", "beta"),
    [("divergence", False, 1.0), ("divergence of a mean", False, 0.5), ("divergence of the top k", True, 1.0)],
)
def test_a_divergence_holds_as_many_copies_of_its_logits_as_preflight_counts(
    outcomes: Any, route: str, top_k: bool, beta: float
) -> None:
    counted = divergence_bytes(VOCAB, on_gpu=True, top_k=top_k, beta=beta)
    found = result(outcomes, f"{route}, main gradient")["share"] * TOKENS * VOCAB * 2
    assert 0.85 * counted < found <= counted


def test_a_chunk_of_the_head_costs_few_launches(outcomes: Any) -> None:
    """Operations that the 8 chunks of 8,192 more tokens add; views and empty tensors launch nothing."""
    views = {"t", "slice", "detach", "unsqueeze", "expand", "device", "empty_like"}
    many, few = (result(outcomes, name)["operations"] for name in ("token loss", "fewer tokens"))
    added = {name: many[name] - few.get(name, 0) for name in many if name not in views}
    assert sum(added.values()) == 8 * 15, added
