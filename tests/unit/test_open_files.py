"""A command may open as many files as its user may, whatever the login shell's limit is."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from megarl import cli
sys.argv = ["megarl.train", "+experiment=gsm8k_sft"]
cli.run_command(lambda arguments: print(resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


@pytest.mark.parametrize(("soft", "hard", "now"), [(256, 4096, 4096), (300, 300, 300)])
def test_a_command_raises_its_limit_of_open_files(soft: int, hard: int, now: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"this user may not open {hard} files")
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(soft=soft, hard=hard)], capture_output=True, text=True, timeout=900
    )
    assert done.stdout.strip() == str((now, hard)), done.stderr
