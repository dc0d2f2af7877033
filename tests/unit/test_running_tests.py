"""A long run of tests names the ones that run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_tests(folder: Path, workers: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder, which has none of this suite's settings but those in `options`."""
    command = [sys.executable, "-m", "pytest", "-n", workers, "--rootdir", str(folder), *options, str(folder)]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False
    )


STALLS = """
import time
from pathlib import Path

def test_at_once():
    pass

def test_that_stalls():
    end = time.monotonic() + 300
    while not Path("named").exists() and time.monotonic() < end:
        time.sleep(0.05)
"""
CONFTEST = """
from pathlib import Path
from tests import running_tests

running_tests.EVERY_S = 0.2

class Naming(running_tests.RunningTests):
    lines = 0

    def line(self):
        text = super().line()
        self.lines += "test_that_stalls" in text
        if self.lines == 3:  # the first may come too early for states of processes, and the second is written
            Path("named").touch()
        return text

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Naming())
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_that_stalls_is_named_while_it_runs(workers: str, tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(STALLS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    run = run_tests(tmp_path, workers)
    assert run.returncode == 0, run.stdout + run.stderr
    named = re.findall(r"\[\d+ min\] \d tests ended; running: (\S+) \(\d+ s\)", run.stdout)
    assert "test_both.py::test_that_stalls" in named, run.stdout
    assert re.search(r"test_that_stalls \(\d+ s\).*; processes: \d+ \w+ in \w+", run.stdout), run.stdout


HANGS = """
import ctypes
import signal

def test_before():
    pass

def test_that_hangs():
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # the limit, put forward
    lock(mutex)  # holds Python's lock, so that no handler of a signal runs
"""


MARKED_HANGS = f"""
import pytest

pytestmark = pytest.mark.timeout(600)
{HANGS}"""
ENDING_HANGS = """
from tests import hangs

hangs.GRACE_S = -592.0  # of a limit of 600 s, 8 are left

def pytest_configure(config):
    config.pluginmanager.register(hangs.Hangs())
"""


def settings(limit_s: int) -> tuple[str, ...]:
    """This suite's settings, with another limit."""
    return "-c", str(ROOT / "pyproject.toml"), "-o", f"timeout={limit_s}", "-p", "no:cacheprovider"


@pytest.mark.parametrize(
    ("workers", "tests", "limit_s"), [("0", HANGS, 600), ("2", HANGS, 600), ("0", MARKED_HANGS, 7200)]
)
def test_a_hang_outside_python_ends_the_process_and_says_where_it_was(
    workers: str, tests: str, limit_s: int, tmp_path: Path
) -> None:
    (tmp_path / "test_hang.py").write_text(tests)
    (tmp_path / "conftest.py").write_text(ENDING_HANGS)
    run = run_tests(tmp_path, workers, *settings(limit_s))
    assert run.returncode == 1
    assert "in test_that_hangs" in run.stderr
    assert re.search(r'test_hang.py", line \d+ in test_that_hangs', run.stderr)
    if workers == "2":
        assert run.stdout.count("crashed while running 'test_hang.py::test_that_hangs'") == 1
        assert "1 failed, 1 passed" in run.stdout


HANGS_LATER = """
import ctypes

import pytest

@pytest.fixture
def late():
    yield
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)

def test_that_fails_and_hangs(late):
    assert False
"""


def test_a_hang_after_a_failure_ends_the_process_too(tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(HANGS_LATER)
    (tmp_path / "conftest.py").write_text(ENDING_HANGS)
    run = run_tests(tmp_path, "0", *settings(limit_s=600))
    assert run.returncode == 1
    assert re.search(r'test_hang.py", line \d+ in late', run.stderr)


TAKES_LONG = """
import time

import pytest

@pytest.mark.timeout(1200)
def test_that_takes_long():
    time.sleep(10)
"""


def test_a_test_with_a_longer_limit_has_it(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(TAKES_LONG)
    (tmp_path / "conftest.py").write_text(ENDING_HANGS)
    run = run_tests(tmp_path, "0", *settings(limit_s=600))
    assert run.returncode == 0, run.stdout + run.stderr


STOPS = """
import os
import signal

def test_that_is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
"""
ENDING = """
import math
import psutil
from tests import running_tests

running_tests.EVERY_S = 0.5

class Ending(running_tests.RunningTests):
    stopped = False

    def line(self):
        self.stopped = any(child.status() == "stopped" for child in psutil.Process().children())
        return super().line()

    def _longest_s(self):
        return math.inf if self.stopped else 0.0  # a busy machine comes late to the stop

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ending())
"""


def test_a_stopped_process_ends_the_suite_by_the_name_of_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_stop.py").write_text(STOPS)
    (tmp_path / "conftest.py").write_text(ENDING)
    run = run_tests(tmp_path, "2")
    assert run.returncode == pytest.ExitCode.INTERRUPTED, run.stdout + run.stderr
    assert re.search(r"running: test_stop.py::test_that_is_stopped \(\d+ s\); processes: .* stopped in", run.stdout)
    assert "a test runs for more than 4200 s, and no limit ends it: the suite ends" in run.stdout
