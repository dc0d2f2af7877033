"""Steps of the acceptance that a CPU can take, at their small sizes: the table finds the figures that they write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acceptance import table
from acceptance.plan import JSON_LINES, Machine, Step, plan
from acceptance.runner import run_all

pytestmark = pytest.mark.long

STEPS = {step.name: step for step in plan(Machine(0, frozenset())) if not step.skip and step.figures == JSON_LINES}
DEARER = {"transport shm", "transport disk"}  # they differ from gloo's in what tests/sglang covers
PEERS = ("liger", "quack", "cut_cross_entropy", "public kernel")
# Labels that say how large the work was, or where: they differ from a GPU's by design.
OF_THE_SIZE = {"device", "vocab", "dtype"}


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """Figures of a step, which runs once. torch.compile does nothing here: it takes a minute, and no figure is kept."""
    made: dict[str, list[dict[str, Any]]] = {}

    def run(name: str) -> list[dict[str, Any]]:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp("step")
            step = STEPS[name]
            quick = Step(name, step.proves, step.command, 600, JSON_LINES, {"TORCHDYNAMO_DISABLE": "1"})
            (result,) = run_all([quick], folder)
            assert result.status == "passed", f"{result.reason}\n{(folder / result.log).read_text()[-3000:]}"
            made[name] = result.figures
        return made[name]

    return run


@pytest.mark.parametrize("name", sorted(STEPS.keys() - DEARER))
def test_a_step_passes_on_the_cpu_and_its_figures_are_numbers(
    name: str, figures_of: Callable[[str], list[dict[str, Any]]]
) -> None:
    figures = figures_of(name)
    assert all(isinstance(figure["value"], int | float) for figure in figures)
    assert len({str({**figure, "value": None}) for figure in figures}) == len(figures), "two figures share their labels"


def test_the_table_names_figures_as_the_scripts_write_them(
    figures_of: Callable[[str], list[dict[str, Any]]],
) -> None:
    """Steps and figures of other kernels that only a GPU has are left out."""
    compared = 0
    for figure in (figure for row in table.ROWS for figure in row.figures):
        on_cpu = {"backend te": "backend cpu", "grpo colocated": "grpo apart"}.get(figure.step, figure.step)
        if on_cpu not in STEPS or on_cpu in DEARER or any(word in str(figure).lower() for word in PEERS):
            continue
        renamed = {"te": "cpu", "colocated": "apart"}
        labels = {k: renamed.get(str(v), v) for k, v in figure.labels.items() if k not in OF_THE_SIZE}
        named = [one for one in figures_of(on_cpu) if one["figure"] == figure.name]
        assert any(labels.items() <= one.items() for one in named), (
            f"{on_cpu} writes no figure {figure.name!r} with {labels}"
        )
        compared += 1
    assert compared > 15
