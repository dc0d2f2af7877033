"""The Dockerfile's steps behind apt's, in a fresh environment on top of the packages of `make gpu-env`.

`MEGARL_GPU_ENV` names another folder than build/gpu-env. Pip gets no index: that environment must meet each pin of
requirements/gpu.txt, and nothing is downloaded. Not covered: the base image, apt, docker itself, and the
compilation of requirements/gpu_built.txt, which `make gpu-env` runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU_ENV = Path(os.environ.get("MEGARL_GPU_ENV", ROOT / "build" / "gpu-env"))
COMPILED = ("gpu_built", "build_gpu_packages")  # words of the steps that compile for half an hour


def instructions() -> Iterator[tuple[str, str]]:
    """Instructions of the Dockerfile in their order, on one line each, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, re.sub(r"\s+", " ", rest).strip()


def sources() -> list[str]:
    """Files that `COPY . .` brings: those that git tracks or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


class Image:
    """A folder in place of the image's file system, and the environment of its shell."""

    def __init__(self, folder: Path) -> None:
        self.venv, self.workdir = folder / "venv", folder
        self.folder = folder
        self.variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}

    def set(self, name: str, value: str) -> None:
        if name not in ("VIRTUAL_ENV", "PATH"):
            self.variables[name] = value

    def copy(self, words: list[str]) -> None:
        *given, target = words
        names = sources() if given == ["."] else given
        for name in names:
            there = self.workdir / (name if given == ["."] else f"{target}{Path(name).name}")
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there)

    def run(self, command: str) -> str:
        paths = os.pathsep.join(
            [str(self.venv / "bin"), str(GPU_ENV / "bin"), os.environ["PATH"]]
        )  # python3.12 is of apt
        outside = {name: os.environ[name] for name in ("HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        environment = outside | self.variables | {"VIRTUAL_ENV": str(self.venv), "PATH": paths}
        shell = ["/bin/bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(
            shell,
            cwd=self.workdir,
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def sees_the_packages_of(self, environment: Path) -> None:
        (there,) = environment.glob("lib/python3.*/site-packages")
        (here,) = self.venv.glob("lib/python3.*/site-packages")
        assert there.parent.name == here.parent.name, "gpu-env has another Python than the image"
        (here / "gpu-env.pth").write_text(f"{there}\n")


def without_apt(command: str) -> str:
    """The parts of a step that need no package manager of the system."""
    parts = [part for part in command.split(" && ") if not re.match(r"apt-get |rm -rf /var/lib/apt", part)]
    return " && ".join(parts)


def test_every_file_that_the_image_copies_exists() -> None:
    copied = [words.split() for word, words in instructions() if word == "COPY"]
    assert len(copied) > 1
    for *names, _ in copied:
        assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_steps_behind_apt_run_up_to_imports(tmp_path: Path) -> None:
    if not (GPU_ENV / "bin" / "python").exists():
        pytest.skip(f"{GPU_ENV} has no environment for GPUs: make gpu-env")
    if not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed: the CUDA kernels cannot be compiled here")
    image, ran = Image(tmp_path), []
    for word, rest in instructions():
        if word == "WORKDIR":
            image.workdir = tmp_path / rest.lstrip("/")
            image.workdir.mkdir(parents=True, exist_ok=True)
        elif word in ("ENV", "ARG"):
            for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', rest):
                image.set(name, value.strip('"'))
        elif word == "COPY":
            image.copy(rest.split())
        elif word == "RUN" and not any(name in rest for name in COMPILED):
            image.run(without_apt(rest))
            ran.append(rest)
            if "-m venv" in rest:
                image.sees_the_packages_of(GPU_ENV)
    assert len(ran) == 3
    facts = image.run(
        "cd / && python -c 'import megarl.ops.native as native, megarl.train, torch, sys;"
        "print(native.HAS_CUDA, *native.CUDA_ARCHITECTURES, native.__file__, torch.version.cuda, sep=chr(10))'"
    ).split()
    has_cuda, *architectures, file, toolkit = facts
    assert has_cuda == "True"
    assert architectures == ["80-real", "90a-real", "100-real", "100-virtual"]
    assert Path(file).is_relative_to(tmp_path)
    assert toolkit.startswith("13.")
