"""Every method has the same loss and gradient norm under every layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.algorithms import ALGORITHMS
from megarl.launcher.local import run_ranks
from megarl.types import cu_seqlens_of

ONE: dict[str, dict[str, Any]] = {"one": {}}
TWO: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "dp2": {"dp_size": 2},
}
METHODS = ("sft", *ALGORITHMS, "ppo's critic", "an update that finds prox_logp")
PROMPT = 3
LENGTHS = torch.tensor([19, 33, 11, 26, 48, 17, 21, 9])


def make_batch() -> dict[str, torch.Tensor]:
    """Builds eight sequences for every method: as two groups of four, as four pairs, or as eight judged completions."""
    generator = torch.Generator().manual_seed(0)
    total, count = int(LENGTHS.sum()), len(LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator)

    return {
        "cu_seqlens": cu_seqlens_of(LENGTHS),
        "input_ids": torch.randint(0, 343, (total,), generator=generator),
        "loss_mask": torch.cat([torch.arange(int(n)) >= PROMPT for n in LENGTHS]),
        "prox_logp_noise": noise(0.2),
        "ref_logp_noise": noise(0.2),
        "rollout_logprobs_noise": noise(0.2),
        "teacher_logp_noise": noise(0.5),
        "values": noise(1.0),
        "rewards": torch.rand(count, generator=generator),
        "reward_columns": torch.rand(count, 2, generator=generator),
        "group_ids": torch.arange(count) // 4,
        "is_chosen": torch.arange(count) % 2 == 0,
        "pair_ids": torch.arange(count) // 2,
        "kto_label": torch.arange(count) % 3 == 0,
        "kto_kl": torch.full((count,), 0.3),
        "kto_desirable_share": torch.full((count,), 1 / 3),
    }


@pytest.fixture(scope="module")
def figures(
    checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[float]]]:
    """Loss and gradient norm by layout and method."""
    work = tmp_path_factory.mktemp("methods")
    (work / "model").symlink_to(checkpoints("qwen3", tied=True))
    save_file(make_batch(), work / "batch.safetensors")
    for ranks, layouts in ((1, ONE), (2, TWO)):
        logs = tmp_path_factory.mktemp("logs")
        code = run_ranks("tests.distributed.methods_worker", [str(work), json.dumps(layouts)], ranks, logs)
        assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir())
    return {name: json.loads((work / f"{name}.json").read_text()) for name in (*ONE, *TWO)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", TWO)
def test_a_layout_gives_the_loss_and_gradient_norm_of_one_process(
    layout: str, method: str, figures: dict[str, dict[str, list[float]]]
) -> None:
    expected, actual = figures["one"][method], figures[layout][method]
    assert all(math.isfinite(value) for value in expected)
    assert expected[1] > 1e-4  # the gradient norm is not zero
    assert actual == pytest.approx(expected, rel=5e-5, abs=1e-7)


def test_no_two_methods_do_the_same(figures: dict[str, dict[str, list[float]]]) -> None:
    norms = {name: round(values[1], 5) for name, values in figures["one"].items()}
    alike = {name: [other for other in norms if norms[other] == norms[name]] for name in norms}
    assert max(len(names) for names in alike.values()) <= 2, alike
