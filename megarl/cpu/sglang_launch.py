"""Prepares SGLang's import on a machine without a GPU, for `megarl/rollout/servers/guarded_launch.py`.

SGLang imports packages that exist for GPUs only, or that text models never call. An import finder stands in for them.
Names resolve and decorators at module level pass; a call from a function raises. All other code is SGLang's own.
Workers are forked from the server's main process, not spawned, which spares each of them the import of SGLang.
"""

from __future__ import annotations

import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

from megarl.cpu.sglang_platform import DETERMINISTIC

STOOD_IN_FOR = ("torchvision", "sgl_kernel", "soundfile", "IPython")
# SGLang copes without it. It is installed for the trainer and would cost half a second of the server's start.
HIDDEN = ("megatron.core",)

# Read at import. One OpenMP thread: more of them spin, which makes a server beside a busy process 40x slower.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "megarl.cpu.sglang_models",
}


class Missing:
    """Any object of a package that is not installed. Raises when a function calls it."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(f"{self._path}.{name}")
        return Missing(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Missing:
        # Module and class bodies have no optimised locals: decorators and constants pass there, function calls fail.
        caller = sys._getframe(1)
        if caller.f_code.co_flags & 0x1:  # CO_OPTIMIZED
            raise RuntimeError(f"{self._path} was called, but this package is not installed on a machine without a GPU")
        return Missing(self._path)

    def __getitem__(self, key: Any) -> Missing:
        return Missing(self._path)

    def __or__(self, other: Any) -> Missing:
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __bool__(self) -> bool:
        return False


class MissingModule(types.ModuleType):
    """Module of a package that is not installed; every attribute is `Missing`."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__}.{name}")
        return Missing(f"{self.__name__}.{name}")


class MissingFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports of the packages in `names` with `MissingModule`s."""

    def __init__(self, names: Sequence[str]):
        self.names = frozenset(names)

    def covers(self, module: str) -> bool:
        return module.partition(".")[0] in self.names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if self.covers(fullname) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes are made when asked for."""


def install() -> None:
    """Installs stand-ins for absent packages of `STOOD_IN_FOR` and sets the environment, before SGLang is imported."""
    absent = [name for name in STOOD_IN_FOR if importlib.util.find_spec(name) is None]
    finder = MissingFinder(absent)
    sys.meta_path.append(finder)
    real_find_spec = importlib.util.find_spec

    @functools.wraps(real_find_spec)
    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        # Stubbed packages must be reported as missing.
        return None if finder.covers(name) else real_find_spec(name, package)

    importlib.util.find_spec = find_spec
    for name in HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import raise ModuleNotFoundError
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # PyPI's torch is built for CUDA and brings NCCL, which SGLang's ranks would then start without a GPU.
    importlib.import_module("torch").version.cuda = None


def fork_workers() -> None:
    """Makes SGLang fork its scheduler and detokenizer; it asks for `spawn` right before it starts them."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    # SGLang collects garbage at every cache flush, so at every weight sync: 0.4 s over all objects. Objects made by
    # imports never become garbage; freezing them takes them out of the collection.
    os.register_at_fork(before=gc.freeze)


def prepare() -> None:
    """Lets this process import and run SGLang's server."""
    install()
    fork_workers()
    if not os.environ.get(DETERMINISTIC):
        importlib.import_module("megarl.cpu.sglang_models.several_steps")  # SGLang's arguments may name it
