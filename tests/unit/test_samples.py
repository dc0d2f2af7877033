"""The viewer of samples in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.knobs import UserError
from megarl.samples import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "evaluations"
    folder.mkdir()
    for step in (0, 20):
        samples = [
            {
                "step": step,
                "problem": n,
                "prompt": f"[bold]question {n}",
                "completion": f"answer {n} at {step}",
                "reward": n / 2,
                "solved": n == 2,
                "versions": [step],
            }
            for n in range(3)
        ]
        (folder / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "shows", "hides", "count"),
    [
        ([], ["answer 0 at 20", "answer 2 at 20", "[bold]question 1"], ["at 0"], "3 of 3"),
        (["step=0"], ["answer 1 at 0"], ["at 20"], "3 of 3"),
        (["show=solved"], ["answer 2 at 20"], ["answer 0"], "1 of 1"),
        (["show=wrong", "count=1"], ["answer 0"], ["answer 1"], "1 of 2"),
        (["find=QUESTION 1"], ["answer 1"], ["answer 0"], "1 of 1"),
    ],
)
def test_samples_are_chosen_and_shown(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], shows: list[str], hides: list[str], count: str
) -> None:
    assert main([str(run), *options]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in shows)
    assert not any(text in out for text in hides)
    assert f"{count} samples" in out


def test_a_completion_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07 \x9b31m \r\x7f \u202e left\nnext\tline"
    sample = {"step": 0, "problem": 0, "reward": 0.0, "solved": False, "versions": [0]}
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps(sample | {"prompt": hostile, "completion": hostile}) + "\n")
    assert main([str(file)]) == 0
    out = capsys.readouterr().out
    assert not any(character in out for character in "\x1b\x07\x9b\r\x7f\u202e")
    assert r"\x1b[2J" in out
    assert r"\u202e" in out
    assert "left " in out
    assert "\\n" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "usage:"),
        (["nowhere"], "nowhere holds no evaluations"),
        (["RUN", "step=7"], "step=7 was not evaluated; there are 0, 20"),
        (["RUN", "show=some"], "show=some is not one of all, solved, wrong"),
        (["RUN", "number=3"], "unknown option number"),
        (["RUN", "count=many"], "count=many must be a number"),
    ],
)
def test_wrong_options_are_refused(run: Path, arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        main([str(run) if argument == "RUN" else argument for argument in arguments])
