"""Forged verdicts, spoofed errors of the set-up, and limits of time, all once more as a user without privileges."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.unit.sandbox.unprivileged import unprivileged

ROOT = Path(__file__).parents[3]
KINDS = "forged or pretend or processor_time or wall_time or sleep_is_limited"


@pytest.mark.skipif(os.getuid() != 0, reason="whoever runs this has no privileges, so those tests have shown it")
def test_kinds_of_attack_that_have_tests_of_their_own_fail_for_a_user_too() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        files = [f"tests/unit/sandbox/{name}.py" for name in ("test_judge", "test_sandbox")]
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", KINDS, *files]
        own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment = {**own, "TMPDIR": folder, "HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            unprivileged(tests, [ROOT]), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20
