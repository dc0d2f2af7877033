"""Holds the basis of `make setup`: versions written once, and one clear line if a machine cannot run megarl."""

import importlib.util
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "requirements" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


write_lock, check_python = load("write_lock"), load("check_python")


def direct() -> list[str]:
    groups = PYPROJECT["dependency-groups"].values()
    return [*PYPROJECT["project"]["dependencies"], *(line for group in groups for line in group)]


def test_every_direct_dependency_is_pinned_to_one_version():
    assert len(direct()) > 40
    versions: dict[str, set[str]] = {}
    for line in direct():
        name, _, version = line.partition("==")
        assert version, f"{line} has no =="
        versions.setdefault(write_lock.canonical(name), set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


def test_the_lock_holds_indirect_dependencies_only_and_serves_with_and_without_a_gpu():
    lines = [line for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines() if line[0] != "#"]
    names = [write_lock.canonical(line) for line in lines]
    assert len(lines) > 40
    assert names == sorted(set(names))
    assert set(names) & {write_lock.canonical(line) for line in direct()} == set()
    assert [line for line in lines if "+" in line or "/" in line or write_lock.FROM_TORCH.match(line)] == []


def test_locking_leaves_out_what_is_pinned_torchs_own_and_local_labels():
    pyproject = {
        "project": {"name": "megarl", "dependencies": ["torch==2.0", "Foo_Bar==1.0"]},
        "dependency-groups": {"dev": ["pytest==9.0"]},
    }
    frozen = [
        "zebra==1.0",
        "foo-bar==1.0",
        "pytest==9.0",
        "torch==2.0+cpu",
        "nvidia-nccl-cu13==2.28",
        "triton==3.7",
        "Jinja2==3.1.6+local",
        "megarl @ file:///somewhere",
        "-e git+ssh://x",
    ]
    assert write_lock.lock_lines(frozen, pyproject) == ["jinja2==3.1.6", "zebra==1.0"]


def test_the_makefile_reads_its_versions_from_pyproject():
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    pins = {line.partition("==")[0]: line for line in direct()}
    for name in ("pip", "torch", "sglang"):
        assert pins[name] in done.stdout
    positions = [done.stdout.index(word) for word in ("-m venv", pins["torch"], "--only-deps", "--editable")]
    assert positions == sorted(positions)


def test_a_python_that_cannot_run_megarl_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch):
    assert check_python.complaint() is None
    monkeypatch.setattr(check_python.sysconfig, "get_paths", lambda: {"include": "/nonexistent"})
    assert "has no C headers" in check_python.complaint()
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    assert "has no venv" in check_python.complaint()
    monkeypatch.setattr(check_python.sys, "version_info", (3, 14, 0))
    assert check_python.complaint() == "is Python 3.14, megarl needs 3.11, 3.12 or 3.13: make PYTHON=python3.12"


@pytest.mark.parametrize(
    ("choice", "compiler"), [("1", "/usr/local/cuda/bin/nvcc"), ("auto", "/usr/local/cuda/bin/nvcc"), ("0", "")]
)
def test_cmake_is_told_of_an_nvcc_that_is_not_on_path(
    choice: str, compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As NVIDIA's packages leave it. CMake itself looks for a compiler on PATH alone."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    build = runpy.run_path(str(ROOT / "setup.py"))["CMakeBuild"]
    monkeypatch.setitem(build.build_extension.__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(build, "get_ext_fullpath", lambda *_: str(tmp_path / "_C.so"))
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"{path}/{name}" if path else None)
    monkeypatch.setenv("MEGARL_CUDA", choice)
    monkeypatch.delenv("CUDACXX", raising=False)
    started: list[tuple[list[str], dict[str, str]]] = []

    def refuse(command: list[str], check: bool, env: dict[str, str]) -> None:
        started.append((command, env))
        raise FileNotFoundError("no CMake in this test")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(FileNotFoundError, match="no CMake"):
        build.build_extension(object.__new__(build), SimpleNamespace(name="megarl._C"))
    ((command, environment),) = started
    assert environment.get("CUDACXX", "") == compiler
    assert f"-DMEGARL_WITH_CUDA={'ON' if compiler else 'OFF'}" in command
