r"""Imports Transformer Engine's own Python modules without its compiled extension, whose names alone are there.

    pip install --no-deps --target build/te-modules transformer_engine==2.12.0 onnxscript onnx onnx_ir ml_dtypes \
        einops fla-core==0.5.2
    PYTHONPATH=build/te-modules:. python -m tests.te.record tests/te/transformer_engine.json --without-extension

The wheel `transformer_engine` is plain Python: its classes create parameters, shape them and mark them. The extension
`transformer_engine_torch` computes, and compiles for half an hour. So modules are built as on a GPU machine, and
nothing runs. Built so, every model that was recorded with the compiled extension came out equal.

`extension_names.json` has the extension's names, read from `pybind.cpp` and `pybind_helper.h` in the sdist of the same
version. Another name is an AttributeError. A call of a function is a RuntimeError, except for the version of cuDNN.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = json.loads((Path(__file__).parent / "extension_names.json").read_text())
CUDNN = 91_900  # 9.19.0, as `get_cudnn_version` gives it


def function(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"transformer_engine_torch.{name} was called, and only its name is here")

    return call


def extension() -> types.ModuleType:
    """The extension's names: functions that raise, classes without anything, and enumerations."""
    module = types.ModuleType("transformer_engine_torch")
    contents: dict[str, Any] = {name: function(name) for name in NAMES["functions"]}
    contents |= {name: type(name, (), {}) for name in NAMES["classes"]}
    contents |= {name: enum.Enum(name, values) for name, values in NAMES["enums"].items()}
    module.__dict__.update(contents, get_cudnn_version=lambda: CUDNN)
    return module


def import_modules() -> None:
    """Imports `transformer_engine.pytorch` on the extension's names.

    Raises:
        ImportError: the wheel is not on the path, or is of another version than the names.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # by it Transformer Engine leaves the libraries of CUDA alone
    sys.modules["transformer_engine_torch"] = extension()
    with warnings.catch_warnings(action="ignore"):  # the package itself looks for the extension's file first
        common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    package = importlib.import_module("transformer_engine.pytorch")
    version = importlib.import_module("transformer_engine").__version__
    if version != NAMES["version"]:
        raise ImportError(f"{package.__file__} has version {version}, and extension_names.json {NAMES['version']}")
