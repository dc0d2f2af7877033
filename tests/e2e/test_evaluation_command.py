"""`python -m megarl.evaluate` on the bundled checkpoint: its figures, samples and summary agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl import cli
from megarl.observe.board.run_data import RunData, listed
from megarl.observe.run_folder import RunFolder
from tests.e2e.test_main_job import Command

pytestmark = pytest.mark.usefixtures("warm_commands")
KNOBS = ("valid_dataset.split='test[:12]'", "evaluator.n_samples=2")


@pytest.mark.long
def test_an_evaluation_is_a_finished_run_with_its_accuracy(tmp_path: Path) -> None:
    model = Path(cli.ASSETS) / "tiny"
    command = Command(tmp_path, "+experiment=gsm8k_grpo", f"actor.path={model}", *KNOBS, module="megarl.evaluate")
    code = command.wait()
    text = command.output.read_text()
    assert code == 0, text[-3000:]
    folder = RunFolder((tmp_path / "gsm8k_grpo_evaluate" / "latest").resolve())
    lines = (folder.evaluations / "step-000000.jsonl").read_text().splitlines()
    solved = [json.loads(line)["solved"] for line in lines]
    assert len(solved) == 24
    accuracy = sum(solved) / len(solved)
    assert 0 < accuracy < 1  # the bundled checkpoint solves some
    summary = json.loads(folder.summary.read_text())
    assert summary == {
        "experiment": "gsm8k_grpo_evaluate",
        "steps": 0,
        "accuracy_after": pytest.approx(accuracy),
        "accuracy_problems": 12,
        "accuracy_samples": 24,
    }
    assert f"{accuracy:.1%} ±" in text
    assert text.count("maj@2") == 1
    assert f"python -m megarl.samples {folder.path.parent}" in text
    row = listed(folder)
    assert (row["state"], row["figures"]) == ("finished", {"eval/accuracy": pytest.approx(accuracy)})
    assert ("held-out accuracy", f"{accuracy:.1%}") in RunData(folder).overview()["facts"]
