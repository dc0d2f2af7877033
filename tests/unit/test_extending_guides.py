"""The guides to rewards, environments, transports and families in docs/ are followed to the letter in a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(python append|python|diff) (\S+)\n(.*?)^```$", re.M | re.S)


def patched(text: str, diff: str) -> str:
    """A file after a page's diff. Hunks are parted by @@; each must fit in exactly one place."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        assert text.count(old) == 1, f"not exactly once in the file:\n{old}"
        text = text.replace(old, new)
    return text


def follow(page: str, copy: Path) -> list[str]:
    """Writes a page's files, appends to them and applies its diffs. Returns the names of the tests it adds."""
    steps = FENCE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    for kind, name, body in steps:
        target = copy / name
        if kind == "diff":
            target.write_text(patched(target.read_text(), body))
        elif kind == "python append":
            target.write_text(f"{target.read_text()}\n\n{body}")
        else:
            assert not target.exists(), f"{page} creates {name}, which is there already"
            target.write_text(body)
    return [name for _, name, _ in steps if Path(name).name.startswith("test_")]


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def pytest_passes(folder: Path, tests: list[str], at_least: int) -> None:
    assert tests
    out = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], folder)
    (passed,) = re.findall(r"(\d+) passed", out)
    assert int(passed) >= at_least


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package and its tests, to be changed."""
    for folder in ("megarl", "configs", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    return tmp_path


def test_a_reward(tmp_path: Path) -> None:
    tests = follow("adding_a_reward.md", tmp_path)
    (tmp_path / "megarl").symlink_to(ROOT / "megarl")
    pytest_passes(tmp_path, tests, 6)


def test_an_environment(tmp_path: Path) -> None:
    tests = follow("adding_an_environment.md", tmp_path)
    (tmp_path / "megarl").symlink_to(ROOT / "megarl")
    pytest_passes(tmp_path, tests, 3)


@pytest.mark.long
def test_a_transport(package: Path) -> None:
    tests = follow("adding_a_transport.md", package)
    pytest_passes(package, tests, 7)
    check = "from megarl import cli; print(cli.load(['+experiment=gsm8k_grpo', 'reshard.transport=store']).reshard)"
    assert "transport='store'" in run([sys.executable, "-c", check], package)


@pytest.mark.long
def test_a_model_family(package: Path) -> None:
    pytest_passes(package, follow("adding_a_model_family.md", package), 3)


def test_a_diff_that_does_not_fit_is_found() -> None:
    assert patched("a\nb\nc\n", " b\n+x\n@@\n-c\n+d\n") == "a\nb\nx\nd\n"
    for diff in (" z\n+x\n", "-b\n-a\n+x\n"):
        with pytest.raises(AssertionError, match="not exactly once"):
            patched("a\nb\nc\n", diff)
