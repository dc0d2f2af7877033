"""Follows docs/adding_an_algorithm.md in a copy of the package and uses the new algorithm by name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^```(python|diff|yaml) (\S+)\n(.*?)^```$", re.M | re.S)
CHECK = """
import torch
from megarl import cli
from megarl.algorithms import algorithm_of
from megarl.types import PackedBatch, cu_seqlens_of

config = cli.load(["+experiment=gsm8k_grpo", "algorithm=best_of_group", "algorithm.scale=2"])
algorithm = algorithm_of(config.algorithm)
logprobs = torch.full((12,), -1.0, requires_grad=True)
mask = torch.tensor([False, True, True] * 4)
batch = PackedBatch(
    cu_seqlens_of(torch.tensor([3] * 4)),
    {"loss_mask": mask, "prox_logp": logprobs.detach()},
    {"rewards": torch.tensor([1.0, 0.25, 0.0, 3.0]), "group_ids": torch.tensor([0, 0, 1, 1])},
)
batch["advantages"] = algorithm.advantages(batch)
assert batch["advantages"].tolist() == [0, 0, 0, 0, -1.5, -1.5, 0, -6, -6, 0, 0, 0]
loss, _ = algorithm.loss(logprobs, torch.zeros(12), batch)
loss.backward()
torch.testing.assert_close(logprobs.grad, -batch["advantages"] / 8)
try:
    cli.load(["+experiment=gsm8k_grpo", "algorithm=best_of_group", "algorithm.scale=0"])
except ValueError as error:
    assert "algorithm.scale=0.0 must be above 0" in str(error)
else:
    raise AssertionError("a scale of 0 was accepted")
print("followed")
"""


def follow(page: str, copy: Path) -> None:
    """Writes the page's files, and inserts a diff's added lines after the line before each."""
    steps = FENCE.findall(page)
    assert [kind for kind, _, _ in steps] == ["python", "diff", "yaml"]
    for kind, name, body in steps:
        target = copy / name
        if kind == "diff":
            text = target.read_text()
            for anchor, added in re.findall(r"^ (.*)\n\+(.*)$", body, re.M):
                assert text.count(f"{anchor}\n") == 1, f"{name} must have exactly one line {anchor!r}"
                text = text.replace(f"{anchor}\n", f"{anchor}\n{added}\n")
            target.write_text(text)
        else:
            assert not target.exists(), f"the page creates {name}, which exists already"
            target.write_text(body)


def test_the_example_is_chosen_by_name_checked_and_gives_its_gradient(tmp_path: Path) -> None:
    for folder in ("megarl", "configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    follow((ROOT / "docs" / "adding_an_algorithm.md").read_text(encoding="utf-8"), tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.stdout.strip() == "followed", result.stderr[-3000:]
