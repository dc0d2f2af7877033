"""Every layout trains a step under NCCL's rules, as a GPU's pipeline would, to the numbers of the single process.

See `nccl_over_gloo` for what the emulation covers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.launcher.local import run_ranks
from megarl.preflight import invariance
from tests import rows
from tests.nccl_semantics.layout_worker import CASES, MODELS, reference_of

LIMIT_S = 900.0
OFTEN = [name for ranks in (2, 4) for name in rows.every(8, [n for n, case in CASES.items() if case.ranks == ranks])]
ROWS = {name: case for name, case in CASES.items() if case.ranks == 1 or name in OFTEN}
WORLDS = sorted({case.ranks for case in ROWS.values()})

pytestmark = rows.marks()


def start(work: Path, ranks: int, names: list[str], limit_s: float) -> int:
    """Runs the cases in one world and returns its exit code. Rank 0's output goes to the terminal."""
    work.mkdir(exist_ok=True)
    invariance.write_models(work, MODELS)
    return run_ranks("tests.nccl_semantics.layout_worker", [str(work), str(limit_s), *names], ranks, work)


def reports(work: Path) -> str:
    """Reports of stuck ranks, and the ends of the ranks' logs. Rank 0 writes to the terminal."""
    stuck, logs = sorted(work.glob("*.stuck")), sorted(work.glob("*.log"))
    return "\n".join([*(file.read_text() for file in stuck), *(file.read_text()[-3000:] for file in logs)])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`world(ranks)` runs all layouts of that many ranks, once, and returns the folder with their figures."""

    def run(ranks: int) -> Path:
        work = tmp_path_factory.mktemp(f"world{ranks}")
        code = start(work, ranks, [n for n, case in ROWS.items() if case.ranks == ranks], LIMIT_S)
        (work / "code").write_text(str(code))
        return work

    return functools.cache(run)


@pytest.mark.parametrize("name", ROWS)
def test_a_layout_trains_a_step_to_the_numbers_of_the_single_process(name: str, world: Callable[[int], Path]) -> None:
    folder = world(ROWS[name].ranks)
    assert (folder / f"{name}.safetensors").exists(), f"a rank failed in or before it\n{reports(folder)}"
    figures = load_file(folder / f"{name}.safetensors")
    expected = load_file(world(1) / f"{reference_of(name)}.safetensors")
    assert set(figures) == set(expected)
    for key, tensor in figures.items():
        if key in invariance.FIGURES:
            assert difference(tensor, expected[key]) <= invariance.TOLERANCE, key
        else:
            assert torch.equal(tensor, expected[key]), key


def difference(tensor: Tensor, expected: Tensor) -> float:
    return float((tensor - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("ranks", WORLDS)
def test_no_rank_is_stuck_at_the_end(ranks: int, world: Callable[[int], Path]) -> None:
    assert (world(ranks) / "code").read_text() == "0", reports(world(ranks))
