"""A command may open as many files as its user may, whatever the login shell's limit is."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

CODE = """
import contextlib, resource, sys
from megarl import cli
sys.argv = ["megarl.train", "+experiment=gsm8k_sft"]
for soft, hard in ((256, 4096), (300, 300)):  # a process may not raise its hard limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.suppress(SystemExit):
        cli.run_command(lambda arguments: print(*resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


@pytest.mark.long
def test_a_command_raises_its_limit_of_open_files() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("this user may not open 4096 files")
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=900)
    assert done.stdout.splitlines() == ["4096 4096", "300 300"], done.stderr
