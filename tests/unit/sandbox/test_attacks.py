"""Attacks from inside the sandbox, as a user without privileges, on this kernel's features and on older ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sandbox.attacks import ATTACKS, DEPENDS_ON_THE_MACHINE
from tests.unit.sandbox.unprivileged import unprivileged

ROOT = Path(__file__).parents[3]
KERNELS = ("this kernel", "this kernel without namespaces", "Linux 5.13")
NAMES = [(kind, name) for kind, attacks in ATTACKS.items() for name in attacks]


@pytest.fixture(scope="module")
def outcomes() -> dict[Any, Any]:
    """Every attack on every kernel, in one start. The key is (kernel, kind, name); kernel "" is without a sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        command = unprivileged([sys.executable, "-m", "tests.unit.sandbox.attack_all"], [ROOT])
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder, "HOME": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["uid"] != 0
        assert found["privileges"] == ["CapEff:\t0000000000000000"]
        assert os.listdir(folder) == []
    return {(line["kernel"], line["kind"], line["name"]): line for line in found["lines"]}


def test_there_are_many_kinds_of_attack() -> None:
    assert len(NAMES) >= 80
    assert {name for _, name in NAMES} >= DEPENDS_ON_THE_MACHINE


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=[f"{kind}: {name}" for kind, name in NAMES])
def test_an_attack_fails_and_changes_nothing(outcomes: dict[Any, Any], kind: str, name: str) -> None:
    for kernel in KERNELS:
        outcome = outcomes[kernel, kind, name]
        assert outcome["status"] == "failed", f"{kernel}: {outcome}"
        assert outcome["changed"] == [], f"{kernel}: {outcome}"


def test_the_same_attacks_succeed_without_a_sandbox(outcomes: dict[Any, Any]) -> None:
    harmless = {name for kind, name in NAMES if outcomes["", kind, name]["status"] != 0}
    assert harmless <= DEPENDS_ON_THE_MACHINE
