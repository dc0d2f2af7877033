"""A student beside its teacher: loss and gradients of every layout are those of transformers in float64."""

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
from megarl.types import cu_seqlens_of
from tests.distributed.teacher_worker import MODES, K

TEMPERATURE, DATA_COEF, PROMPT = 0.8, 0.3, 3
LENGTHS = torch.tensor([19, 33, 11, 26, 8, 17])
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"tp1": {}},
    2: {
        "tp2": {"tp_size": 2},
        "tp2 sp": {"tp_size": 2, "sequence_parallel": True},
        "cp2": {"cp_size": 2},
        "pp2": {"pp_size": 2},
        "dp2": {"dp_size": 2},
    },
}
ALL = [(name, mode) for layouts in LAYOUTS.values() for name in layouts for mode in MODES]


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    return {
        "cu_seqlens": cu_seqlens_of(LENGTHS),
        "input_ids": torch.randint(0, 340, (total,), generator=generator),
        "loss_mask": torch.cat([torch.arange(int(n)) >= PROMPT for n in LENGTHS]),
        "prox_logp": torch.zeros(total),
        "advantages": torch.zeros(total),
    }


def divergence_of(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """The divergence by its definition, summed over the rows."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum()

    if beta in (0, 1):
        return kl(logp, logq) if beta == 0 else kl(logq, logp)
    m = (beta * logp.exp() + (1 - beta) * logq.exp()).log()
    return beta * kl(logp, m) + (1 - beta) * kl(logq, m)


def with_rest(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of the events `ids`, and of all others together."""
    chosen = logprobs.gather(1, ids)
    return torch.cat((chosen, torch.log1p(-chosen.exp().sum(1, keepdim=True))), 1)


def reference(work: Path) -> dict[str, Tensor]:
    """Loss, divergence and gradients by mode, from whole logits of float64 models."""
    batch = make_batch()
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float64, attn_implementation="eager")
        for name in ("student", "teacher")
    )
    common = min(student.config.vocab_size, teacher.config.vocab_size)
    figures: dict[str, Tensor] = {}
    for mode, (kind, beta) in MODES.items():
        divergence = nll = torch.zeros((), dtype=torch.float64)
        count = 0
        for ids in batch["input_ids"].split(LENGTHS.tolist()):
            q = student(ids[None]).logits[0, PROMPT - 1 : -1] / TEMPERATURE
            with torch.no_grad():
                p = teacher(ids[None]).logits[0, PROMPT - 1 : -1] / TEMPERATURE
            logq, logp = q.log_softmax(1), p.log_softmax(1)
            if kind == "full":
                parts = p[:, :common].log_softmax(1), q[:, :common].log_softmax(1)
            else:
                top = logp[:, :common].topk(K, 1).indices
                parts = with_rest(logp, top), with_rest(logq, top)
            divergence = divergence + divergence_of(*parts, beta)
            nll = nll - logq.gather(1, ids[PROMPT:, None]).sum()
            count += len(ids) - PROMPT
        loss = (divergence + DATA_COEF * nll) / count
        student.zero_grad()
        loss.backward()
        figures |= {f"{mode} loss": loss.detach(), f"{mode} teacher_divergence": divergence.detach() / count}
        figures |= {f"{mode}/{name}": value.grad.clone() for name, value in student.named_parameters()}
    return figures


@pytest.fixture(scope="module")
def figures(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Loss and gradients by layout, and those of the reference."""
    work = tmp_path_factory.mktemp("teacher")
    (work / "student").symlink_to(checkpoints("qwen3", tied=True))
    (work / "teacher").symlink_to(checkpoints("qwen3", tied=False, hidden_size=96, vocab_size=347, seed=5))
    save_file(make_batch(), work / "batch.safetensors")
    for ranks, layouts in LAYOUTS.items():
        logs = tmp_path_factory.mktemp("logs")
        code = run_ranks("tests.distributed.teacher_worker", [str(work), json.dumps(layouts)], ranks, logs)
        assert code == 0, "\n".join(p.read_text()[-2000:] for p in logs.iterdir() if p.is_file())
    names = [name for layouts in LAYOUTS.values() for name in layouts]
    return {"float64": reference(work)} | {name: load_file(work / f"{name}.safetensors") for name in names}


@pytest.mark.parametrize(("layout", "mode"), ALL)
def test_loss_and_gradients_are_those_of_whole_float64_logits(
    layout: str, mode: str, figures: dict[str, dict[str, Tensor]]
) -> None:
    expected, actual = figures["float64"], figures[layout]
    for key in ("loss", "teacher_divergence"):
        assert float(expected[f"{mode} {key}"]) > 1e-3
        assert float(actual[f"{mode} {key}"]) == pytest.approx(float(expected[f"{mode} {key}"]), rel=2e-5)
    names = [key for key in expected if key.startswith(f"{mode}/")]
    assert names
    norm = math.sqrt(sum(float(expected[name].square().sum()) for name in names))
    for name in names:
        assert float((actual[name].double() - expected[name]).norm()) < 1e-4 * norm, name


def test_every_layout_finds_the_same_likely_tokens(figures: dict[str, dict[str, Tensor]]) -> None:
    expected = figures["tp1"]
    for layouts in LAYOUTS.values():
        for name in layouts:
            assert torch.equal(figures[name]["top_ids"], expected["top_ids"])
            for key in ("top_logprobs", "teacher_logp"):
                torch.testing.assert_close(figures[name][key], expected[key], rtol=1e-4, atol=1e-4)
