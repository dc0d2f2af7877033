"""The table of planted bugs fits today's code: each original stands once in its file, and each change is code."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutant_accepted
import pytest
from mutant import Mutant
from mutant_operators import FOLDERS, candidates, replaced
from mutant_table import MUTANTS

ROOT = Path(__file__).parents[2]


@functools.cache
def program_of(text: str) -> str:
    """The syntax tree of a file, whose bugs are compared with it one after the other."""
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_its_file_and_has_tests(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    mutated = mutant.applied_to(text)  # raises where the code has changed
    assert mutated != text
    if mutant.file.endswith(".py"):
        assert ast.dump(ast.parse(mutated)) != program_of(text), "the same program"
    assert mutant.tests
    for test in mutant.tests:
        assert (ROOT / test.split("::")[0]).exists(), test


def test_names_are_unique() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_every_operator_changes_the_program_at_its_place() -> None:
    operators = Counter()
    for folder in FOLDERS:
        path = sorted((ROOT / folder).rglob("*.py"))[1]
        text = path.read_text()
        for operator, node, new, line in candidates(text):
            mutated = replaced(text, node, new)
            assert ast.dump(ast.parse(mutated)) != program_of(text), (path, node.lineno, new)
            assert 0 < line <= node.lineno
            operators[operator] += 1
    assert set(operators) == {"comparison", "constant", "condition", "statement", "arguments", "junction", "sign"}


def test_accepted_survivors_have_a_reason() -> None:
    assert all(part and len(why.split()) > 3 for part, why in mutant_accepted.ACCEPTED.items())


@pytest.mark.long
def test_the_runner_notices_a_planted_bug_and_lets_an_equal_program_pass(tmp_path: Path) -> None:
    """Runs the real runner on one bug and on one change that is none, in a process of its own."""
    code = """
import sys
sys.path.insert(0, "tests/mutants")
import run_mutants
from mutant import Mutant

tests = ("tests/unit/algorithms/test_grpo.py::test_equal_rewards_in_a_group_give_no_advantage",)
change = ("megarl/algorithms/base.py", "    return spread.masked_fill(")
bug = Mutant("bug", *change, "    return 1 + spread.masked_fill(", tests)
same = Mutant("same", *change, "    return 0 + spread.masked_fill(", tests)
error = Mutant("error", *change, "    return )", tests)
run_mutants.copied_tree()
for mutant in (bug, same, error):
    print("RESULT", run_mutants.judge(mutant).outcome)
assert (run_mutants.TREE / change[0]).read_text() == (run_mutants.ROOT / change[0]).read_text()
"""
    environment = {"MEGARL_MUTANTS": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("RESULT")] == [
        "RESULT noticed", "RESULT survived", "RESULT noticed",
    ]  # fmt: skip
