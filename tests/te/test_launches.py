"""Operations that a layer of experts issues under `te`: the table of docs/numbers.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
PRODUCTS, SUMS = ("mm", "grouped_gemm"), ("add_",)
MODEL = Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
    intermediate_size=96, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=8, norm_topk_prob=True,
    tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"],
)  # fmt: skip


@pytest.mark.long
def test_grouped_experts_issue_few_operations_and_the_page_says_how_many(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.te.launches", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{STAND_IN}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    counts = [json.loads(run.stdout.splitlines()[-1])[name] for name in ("one by one", "grouped")]
    products, sums = ([sum(c.get(name, 0) for name in names) for c in counts] for names in (PRODUCTS, SUMS))
    totals = [c["total"] for c in counts]
    rest = [t - p - s for t, p, s in zip(totals, products, sums, strict=True)]
    assert counts[1]["grouped_gemm"] == 6  # two products, each with the gradients of its rows and of its weights
    page = (ROOT / "docs" / "numbers.md").read_text()
    for what, (before, after) in {
        "matrix products": products,
        "sums of weight gradients into the main gradients": sums,
        "sorting of tokens, activation, router, casts": rest,
        "all": totals,
    }.items():
        assert f"| {what} | {before} | {after} |" in page, (what, before, after)
