"""Each command tells its own usage, and a command line that names no experiment is answered with the remedy."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.exit_codes import exit_code, reads_its_configuration

COMMANDS = (
    "train",
    "evaluate",
    "serve",
    "report",
    "samples",
    "dashboard",
    "replay",
    "compare",
    "export",
    "launcher.status",
    "preflight",
    "doctor",
)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_the_command_it_was_asked_of(
    name: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, flag])
    monkeypatch.delitem(sys.modules, f"megarl.{name}", raising=False)  # runpy warns of a module that is loaded
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"megarl.{name}", run_name="__main__")
    assert end.value.code in (0, None)
    assert re.match(rf"usage: python -m megarl\.{name}\b", capsys.readouterr().out)


def test_a_command_line_without_an_experiment_is_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(reads_its_configuration, [], monkeypatch) == 2
    assert capsys.readouterr().err == (
        "megarl: no experiment is named; give one, such as +experiment=gsm8k_grpo (--help lists them)\n"
    )
