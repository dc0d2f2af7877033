"""Files of a run in the sandbox lie in memory of its own, where the machine gives it."""

from __future__ import annotations

import subprocess

import pytest

from megarl.sandbox import Features, run_python

UNSHARED = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]


@pytest.mark.skipif(
    subprocess.run(UNSHARED, check=False).returncode != 0, reason="this machine gives no namespace with files in memory"
)
@pytest.mark.parametrize(("features", "bounded"), [(Features(), True), (Features(namespaces=False), False)])
def test_files_of_a_run_are_in_memory_of_bounded_size_where_there_are_namespaces(
    features: Features, bounded: bool
) -> None:
    """75 MiB in five files, each below the limit of a file."""
    code = "import os\nfor n in range(5): open(f'{n}', 'wb').write(bytes(15 * 2**20))\nprint('written')"
    done = run_python(code, time_limit_s=30.0, features=features)
    assert ("No space left on device" in done.stderr, done.stdout) == ((True, "") if bounded else (False, "written\n"))
