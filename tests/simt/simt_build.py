"""Builds the CUDA kernels of csrc/ as a Python module that runs them on the CPU.

The sources are copied, and three things in `.cu` and `.cuh` files are rewritten: launches, `__shared__` variables and
inline PTX. Objects and modules are kept in build/simt under a hash of sources and command, so only changes compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[2]
EMULATOR = Path(__file__).parent / "emulator"
CACHE = Path(os.environ.get("MEGARL_SIMT_CACHE", ROOT / "build" / "simt"))
COMPILE_LIMIT_S = 600.0  # of one file, on a busy machine
LOCK_LIMIT_S = 900.0  # of another process that builds the same

LAUNCH = re.compile(r"((?:\w+::)*\w+(?:<[^<>;]*>)?)<<<(.*?)>>>\s*\(", re.S)
SHARED = re.compile(r"\b(?<!extern )__shared__\s+([^;\[\]]+?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
PTX = re.compile(r'\basm(?:\s+volatile)?\s*\(\s*"([\w.]+) [^";]*;"\s*:([^:;]*):([^:;]*)\)\s*;')
OPERAND = re.compile(r'"[^"]*"\s*\(([^()]*)\)')
KERNEL = re.compile(r"__global__[^{;]*\{")
LEFT = re.compile(r"<<<|\b__shared__\b|\basm\b")


def rewrite(text: str, name: str) -> str:
    """Replaces the syntax that a C++ compiler does not know. Line numbers stay.

    Raises:
        ValueError: a launch, shared variable or PTX instruction of a form that is not known here.
    """

    def operands(match: re.Match[str]) -> str:
        arguments = ", ".join(OPERAND.findall(match[2] + "," + match[3]))
        return f"simt::ptx::{match[1].replace('.', '_')}({arguments});"

    text = LAUNCH.sub(r"simt::launch(\1, \2)(", text)
    text = SHARED.sub(r'static char \2_tag; auto& \2 = simt::shared_memory<\1\3>(&\2_tag, "\2");', text)
    text = PTX.sub(operands, text)
    text = KERNEL.sub(lambda match: match[0] + " simt::enter(__PRETTY_FUNCTION__);", text)
    code = re.sub(r"//.*", "", text)
    if unknown := LEFT.search(code):
        line = code[: unknown.start()].count("\n") + 1
        raise ValueError(f"{name}:{line}: the emulator does not know this form of {unknown[0]}; teach simt_build.py")
    return f'#line 1 "{name}"\n{text}'


class Kernels:
    """The sources of a `csrc` folder, with changed or more texts by path, and their compilation."""

    def __init__(self, csrc: Path, changes: Mapping[str, str] | None = None, sanitize: bool = False):
        self.csrc, self.sanitize = csrc, sanitize
        self.operations = sorted(p.parent.name for p in csrc.glob("*/cuda.cu") if (p.parent / "bind.cpp").exists())
        self.texts = {
            f"csrc/{path.relative_to(csrc)}": path.read_text()
            for folder in ("common", *self.operations)
            for path in sorted((csrc / folder).iterdir())
        }
        self.emulator = {path.name: path.read_text() for path in sorted(EMULATOR.iterdir())}
        self.texts |= changes or {}

    def compiled(self) -> dict[str, Path]:
        """Returns the objects by source; compiles those that are not there yet."""
        names = [*(n for n in self.texts if n.endswith((".cu", ".cpp"))), "simt.cpp", "module.cpp"]
        return {name: self.object_of(name) for name in names}

    def object_of(self, name: str) -> Path:
        cuda = name.endswith(".cu")
        flags = ["-std=gnu++17", "-fPIC", "-fvisibility=hidden", "-Wno-psabi", "-DMEGARL_WITH_CUDA"]
        flags += ["-DMEGARL_ISA=baseline", "-O1" if cuda or name == "simt.cpp" else "-O0"]
        if cuda:
            flags += ["-x", "c++", "-D__CUDACC__"]
        if name == "module.cpp":
            flags.append(f"-DSIMT_OPERATIONS(X)={' '.join(f'X({o})' for o in self.operations)}")
        if self.sanitize and (cuda or name == "simt.cpp"):
            flags += ["-fsanitize=address", "-g1"]
        texts = self._read_by(name)
        key = digest(*flags, name, sys.version, *(part for item in texts.items() for part in item))
        out = CACHE / f"{key}.o"
        if not out.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                for path, text in texts.items():
                    target = Path(folder, path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(rewrite(text, path) if path.endswith((".cu", ".cuh")) else text)
                includes = [folder, f"{folder}/csrc", pybind11.get_include(), sysconfig.get_paths()["include"]]
                partial = f"{folder}/object.o"
                compiler(*flags, *(f"-I{i}" for i in includes), "-c", str(Path(folder, name)), "-o", partial)
                os.replace(partial, out)
        return out

    def _read_by(self, name: str) -> dict[str, str]:
        """Returns the texts that a source may include, and its own."""
        if name == "simt.cpp":
            return self.emulator
        folders = ("csrc/common/", f"{Path(name).parent}/")
        headers = {n: t for n, t in self.texts.items() if n.startswith(folders) and not n.endswith((".cu", ".cpp"))}
        if name == "module.cpp":
            return {**self.emulator, **headers}
        emulator = {n: t for n, t in self.emulator.items() if n.endswith(".h")} if name.endswith(".cu") else {}
        return {name: self.texts[name], **headers, **emulator}


def compiler(*arguments: str) -> None:
    command = [os.environ.get("CXX", "g++"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[:4000]}"


def linked(objects: Iterable[Path], sanitize: bool = False) -> Path:
    """Links objects to a library, unless there is one."""
    objects = list(objects)
    out = CACHE / f"{digest(*(o.name for o in objects))}.so"
    if not out.exists():
        partial = out.with_suffix(f".{os.getpid()}")
        more = ["-fsanitize=address"] if sanitize else []
        compiler("-shared", *more, *map(str, objects), "-o", str(partial))
        os.replace(partial, out)
    return out


def loaded(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"emulated_{library.stem}._C", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(csrc: Path = ROOT / "csrc", sanitize: bool = False) -> Path:
    """Returns the library of the unchanged kernels."""
    with lock():
        return linked(Kernels(csrc, sanitize=sanitize).compiled().values(), sanitize)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@contextmanager
def lock() -> Iterator[None]:
    """Lets one process build at a time, as two would compile the same files."""
    CACHE.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_LIMIT_S
    with open(CACHE / "lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process builds in {CACHE} for over {LOCK_LIMIT_S:.0f} s") from None
                time.sleep(0.2)
        yield


if __name__ == "__main__":
    print(built(sanitize="sanitize" in sys.argv[1:]))
