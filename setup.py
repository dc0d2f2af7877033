"""Lists the packages and lets CMake build megarl/_C. Everything else is in pyproject.toml.

MEGARL_CUDA=auto (default) builds the CUDA kernels where nvcc is found, 1 requires them, 0 leaves them out. CUDAARCHS
names other GPUs than CMakeLists.txt does, as CMake takes them: CUDAARCHS=native, CUDAARCHS="80-real;120-real".
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def nvcc() -> str | None:
    """Path of the compiler of CUDA kernels; None builds without them."""
    choice = os.environ.get("MEGARL_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"MEGARL_CUDA is {choice!r}; it must be auto, 0 or 1")
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if choice == "1" and not found:
        raise SystemExit("MEGARL_CUDA=1 but nvcc was not found; put it on PATH or use MEGARL_CUDA=0")
    return None if choice == "0" else found


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        compiler = nvcc()
        build = ROOT / "build" / ("cuda" if compiler else "cpu")
        build.mkdir(parents=True, exist_ok=True)
        architectures = os.environ.get("CUDAARCHS")  # without it, an earlier build's choice is forgotten
        configure = [
            *(sys.executable, "-m", "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMEGARL_WITH_CUDA={'ON' if compiler else 'OFF'}",
            f"-DCMAKE_CUDA_ARCHITECTURES={architectures}" if architectures else "-UCMAKE_CUDA_ARCHITECTURES",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or ninja_of_package()}",
        ]
        # CMake looks for nvcc on PATH, not where NVIDIA's packages put it.
        found = {"CUDACXX": os.environ.get("CUDACXX", compiler)} if compiler else {}
        subprocess.run(configure, check=True, env={**os.environ, **found})
        subprocess.run([sys.executable, "-m", "cmake", "--build", str(build)], check=True)
        built = next(build.glob("_C.*.so"))
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_name(library.name + ".partial")
        shutil.copy2(built, partial)
        os.replace(partial, library)  # whoever has the old module open keeps it


def ninja_of_package() -> str:
    import ninja

    return str(Path(ninja.BIN_DIR) / "ninja")


# configs/, assets/ and slurm/ stand at the root, where readers look for them, and are shipped inside the package.
DATA_FOLDERS = [name for name in ("configs", "assets", "slurm") if (ROOT / name).is_dir()]

setup(
    packages=[*find_packages(include=["megarl", "megarl.*"]), *(f"megarl.{name}" for name in DATA_FOLDERS)],
    package_dir={"megarl": "megarl", **{f"megarl.{name}": name for name in DATA_FOLDERS}},
    package_data={
        **{f"megarl.{name}": ["**/*"] for name in DATA_FOLDERS},
        "megarl.observe.board": ["*.js", "*.css"],
    },
    ext_modules=[Extension("megarl._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
