"""The invariance command: every layout gives the single process's numbers, and differences are reported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.preflight import invariance

ALL = tuple(invariance.CASES)
FEW = ("tp1", "tp2 sp", "cp2", "dp2 overlap")


# Every row runs in test_layouts_under_nccl.py too, with NCCL's rules in force.
@pytest.mark.parametrize("names", [FEW, pytest.param(ALL, marks=pytest.mark.long)], ids=["a few", "all"])
def test_every_layout_gives_the_numbers_of_the_single_process(
    names: Sequence[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = invariance.run_invariance(tmp_path / "kept", names)
    printed = capsys.readouterr().out
    assert code == 0, printed
    for name in names:
        verdict = "reference" if name in invariance.REFERENCES else "ok"
        assert re.search(rf"│ {re.escape(name)} +│.*{verdict} │", printed), printed
        assert set(load_file(tmp_path / "kept" / f"{name}.safetensors")) == set(invariance.FIGURES)


@pytest.mark.parametrize(
    ("figure", "change"),
    [("logprobs", 1e-4), ("advantages", 1e-4), ("loss", 1e-4), ("grad_norm", 1e-4), ("loss", float("nan"))],
)
def test_a_layout_that_differs_is_told(
    figure: str, change: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the real worlds writes one layout's figure slightly off."""

    def world(module: str, arguments: list[str], size: int, logs: Path) -> int:
        for name, case in invariance.CASES.items():
            if case.ranks == size:
                figures: dict[str, Any] = {f: torch.ones(3, dtype=torch.float64) for f in invariance.FIGURES}
                if name == "cp2 tp2":
                    figures[figure] = figures[figure] + change
                save_file(figures, Path(arguments[0]) / f"{name}.safetensors")
        return 0

    monkeypatch.setattr(invariance, "run_ranks", world)
    assert invariance.run_invariance() == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if "differs" in line]
    assert len(rows) == 1
    assert "cp2 tp2 " in rows[0]


def test_a_world_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(invariance, "run_ranks", lambda *_: 7)
    assert invariance.run_invariance() == 1
    assert "the world of 1 ranks ended with code 7" in capsys.readouterr().err
