"""The versions for GPUs against pyproject.toml's, and against what the packages themselves ask for; the doctor."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import megatron.core
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from megarl import doctor
from megarl.versions import GPUs

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins(name: str) -> dict[str, str]:
    """The versions of a requirements file, by canonical name."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines()]
    return {canonical(r.name): exact(r) for r in (Requirement(line) for line in lines if line)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def exact(requirement: Requirement) -> str:
    (one,) = requirement.specifier
    assert one.operator == "==", requirement
    return one.version


GPU, BUILT = pins("gpu.txt"), pins("gpu_built.txt")
DIFFER = {"torch", "triton", "numpy"}  # what SGLang's requirements want otherwise; docs/install_gpu.md says why


def test_what_megarl_imports_has_the_same_version_with_and_without_gpus() -> None:
    delta = PYPROJECT["project"]["optional-dependencies"]["delta"]
    for line in [
        *PYPROJECT["project"]["dependencies"],
        *PYPROJECT["dependency-groups"]["build"],
        *delta,
        "sglang==0.5.23",
    ]:
        requirement = Requirement(line)
        name = canonical(requirement.name)
        assert name in GPU, f"requirements/gpu.txt lacks {line}"
        if name not in DIFFER:
            assert GPU[name] == exact(requirement), name
    assert "sglang==0.5.23" in PYPROJECT["dependency-groups"]["sglang-no-deps"]


def test_what_the_device_tests_import_has_the_same_version_with_and_without_gpus() -> None:
    lines = {canonical(Requirement(line).name): line for line in PYPROJECT["dependency-groups"]["dev"]}
    for name in ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"):
        assert f"{name}=={GPU.get(name)}" == lines[name]


def test_the_device_tests_run_in_the_active_environment_and_not_in_the_one_without_gpus() -> None:
    dry_run = ["make", "--dry-run", "--always-make", "test-gpu", "PYTHON=/active/python"]
    lines = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "/active/python -m pytest tests/gpu" in lines
    assert re.search(r"compute-sanitizer .* /active/python -m pytest tests/gpu", lines)
    assert ".venv" not in lines
    assert "pip" not in lines


def test_without_a_gpu_the_device_tests_say_which_environment_they_want() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = ["make", "test-gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 2
    assert f"make: {sys.executable} has no pytest, or no torch that sees a GPU: activate" in done.stdout


def test_torch_is_the_one_that_sglangs_kernels_are_compiled_for() -> None:
    asked = [Requirement(line) for line in importlib.metadata.requires("sglang") or []]
    (torch,) = [r for r in asked if r.name == "torch"]
    assert GPU["torch"] in torch.specifier


def test_sglang_accepts_every_version_that_is_pinned_beside_it() -> None:
    asked = [Requirement(line) for line in importlib.metadata.requires("sglang") or []]
    ours = [r for r in asked if not (r.marker and "extra" in str(r.marker)) and canonical(r.name) in GPU]
    assert len(ours) > 5
    assert [str(r) for r in ours if GPU[canonical(r.name)] not in r.specifier] == []


def test_transformer_engine_has_the_features_that_megatron_core_needs_for_these_models() -> None:
    """Newer versions than the pinned one do not load beside torch's cuBLAS (requirements/gpu_built.txt)."""
    asked = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or []]
    (engine,) = [r for r in asked if r.name == "transformer-engine"]
    assert BUILT["transformer-engine"] in engine.specifier
    assert {"core_cu13", "pytorch"} <= engine.extras
    sources = Path(megatron.core.__file__).parent.rglob("*.py")
    features = {v for file in sources for v in re.findall(r'is_te_min_version\("(\d+\.\d+\.\d+)', file.read_text())}
    assert {v for v in features if Version(v) > Version(BUILT["transformer-engine"])} == {
        "2.13.0",  # routers with sqrtsoftplus scores
        "2.14.0",  # experts' weights in one tensor, grouped SwiGLU in one kernel: for MXFP8
    }


# (package, version) of gpu_built.txt -> distributions that its setup.py imports, where pip builds without isolation.
# transformer_engine_torch 2.12.0: setup.py:15-21. flash_attn 2.8.3: setup.py:12-23 and :510.
BUILD_IMPORTS = {
    ("transformer-engine", "2.12.0"): ("setuptools", "wheel", "packaging", "torch"),
    ("flash-attn", "2.8.3"): ("setuptools", "wheel", "packaging", "torch", "psutil"),
}


def test_what_the_compiled_packages_import_to_be_built_is_pinned() -> None:
    assert set(BUILT.items()) == set(BUILD_IMPORTS), "read setup.py of the new version and change BUILD_IMPORTS"
    for package, imports in BUILD_IMPORTS.items():
        assert [name for name in imports if name not in GPU] == [], package


def test_flash_attn_is_one_that_transformer_engine_takes() -> None:
    """By `FlashAttentionUtils` of attention/dot_product_attention/utils.py:117, Transformer Engine 2.12.0."""
    assert BUILT["transformer-engine"] == "2.12.0", "read the versions of flash-attn that the new one takes"
    assert Version("2.7.3") <= Version(BUILT["flash-attn"]) <= Version("2.8.3")


@pytest.mark.parametrize(
    ("tools", "python", "error"),
    [
        ((), "", "gpu-env: nvcc was not found: install the CUDA 13 toolkit and put its bin/ on PATH"),
        (("nvcc",), "python2", "gpu-env: PYTHON=python2 is not Python 3.12 or 3.13: make gpu-env PYTHON=python3.12"),
        (("nvcc",), "", "gpu-env: no Python 3.12 or 3.13 was found on PATH: make gpu-env PYTHON=/path/to/python3.12"),
    ],
)
def test_the_gpu_environment_is_refused_in_one_line(
    tools: tuple[str, ...], python: str, error: str, tmp_path: Path
) -> None:
    """Planted: the commands on PATH, among them an nvcc that is never called."""
    for name in tools:
        (tmp_path / name).touch(mode=0o755)
    for name in ("dirname", "realpath"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script = str(ROOT / "requirements" / "gpu_env.sh")
    command = ["/bin/bash", script, str(tmp_path / "environment"), python]
    run = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr.splitlines()) == (2, [error])
    assert not (tmp_path / "environment").exists()


def test_the_image_installs_these_files_and_builds_the_cuda_kernels() -> None:
    image = (ROOT / "Dockerfile").read_text()
    for line in ("requirements/gpu.txt", "requirements/build_gpu_packages.sh", "MEGARL_CUDA=1", "nvidia/cuda:13."):
        assert line in image
    page = (ROOT / "docs" / "install_gpu.md").read_text()
    assert f"asks for torch {GPU['torch']}" in page
    assert "APEX_CUDA_EXT" in page


def test_the_doctor_finds_nothing_missing_where_the_tests_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.command() == 0
    text = capsys.readouterr().out
    assert "nothing that is needed is missing" in text
    assert importlib.metadata.version("megatron-core") in text
    assert text.count("\n") < 40  # one screen


def test_the_doctor_says_what_a_gpu_machine_lacks_and_what_it_would_bring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the driver's answer, and a torch without NCCL, which only its CUDA build has."""
    if doctor.version_of("transformer-engine") is not None:
        pytest.skip("this machine has what the test expects to be missing")
    monkeypatch.setattr(doctor, "gpus", lambda: GPUs(("NVIDIA H100",) * 8, (81559,) * 8, "580.65"))
    installed = doctor.versions()
    monkeypatch.setattr(doctor, "versions", lambda: installed | {"NCCL": None})
    assert doctor.command() == 1
    text = capsys.readouterr().out
    assert "8 x NVIDIA H100 of 80 GiB, driver 580.65" in text
    assert re.search(r"MISSING  NCCL: .*torch's CUDA build", text)
    assert re.search(r"faster   with Transformer Engine: .*; requirements/build_gpu_packages.sh", text)
    assert re.search(r"faster   with apex: .*nothing beside it", text)  # as there is no Transformer Engine
    assert text.count("\n") < 50


def test_transformer_engine_is_pointed_to_the_cudnn_of_torchs_wheels(tmp_path: Path) -> None:
    """It loads the machine's otherwise, and attention fails where two versions meet in a process."""
    wheel = tmp_path / "nvidia" / "cudnn"
    wheel.mkdir(parents=True)
    (wheel / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDNN_HOME": "/usr"}
    command = [sys.executable, "-c", "import megarl, os; print(os.environ['CUDNN_HOME'])"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    assert printed.strip() == str(wheel)
