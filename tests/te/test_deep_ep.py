"""DeepEP's interface that Megatron's flex dispatcher calls: the stand-in has that of the package for GPUs."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from megarl.actor.checks import DEEP_EP_RANKS

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in" / "deep_ep"
GPU_ENV = Path(os.environ.get("MEGARL_GPU_ENV", ROOT / "build" / "gpu-env"))
METHODS = ("__init__", "set_num_sms", "dispatch", "combine")
METHODS += ("get_dispatch_config", "get_combine_config", "get_dispatch_layout")


@pytest.fixture(scope="module")
def package() -> Path:
    """Folder of the package. It cannot be imported without a GPU, so its source is read."""
    folders = list(GPU_ENV.glob("lib/python3.*/site-packages/deep_ep"))
    if not folders:
        pytest.skip(f"{GPU_ENV} has no GPU environment: run `make gpu-env`, or name another in MEGARL_GPU_ENV")
    return folders[0]


def signatures(file: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Names and defaults of the parameters of `Buffer`'s methods that Megatron calls."""
    (buffer,) = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "Buffer"]
    return {
        method.name: ([a.arg for a in method.args.args], [ast.unparse(d) for d in method.args.defaults])
        for method in buffer.body
        if isinstance(method, ast.FunctionDef) and method.name in METHODS
    }


def imported(file: Path) -> set[str]:
    """Names that a module has by import."""
    found = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ImportFrom)]
    return {alias.asname or alias.name for statement in found for alias in statement.names}


def test_the_stand_in_takes_the_packages_arguments(package: Path) -> None:
    real, ours = (signatures(folder / "buffers" / "legacy.py") for folder in (package, STAND_IN))
    assert set(ours) == set(METHODS)
    assert ours == real


def test_the_package_keeps_the_event_where_megatron_does_not_look(package: Path) -> None:
    """Once it stands in `deep_ep.utils` again, `megatron_patches.provide_deep_ep` is not needed."""
    for folder in (package, STAND_IN):
        assert imported(folder / "utils" / "__init__.py") == {"EventHandle"}
        assert "class EventOverlap" in (folder / "utils" / "event.py").read_text()


def test_the_numbers_of_ranks_are_the_packages(package: Path) -> None:
    tree = ast.parse((package / "buffers" / "legacy.py").read_text())
    tables = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict) and ast.unparse(n.targets[0]) == "config_map"
    ]
    assert len(tables) == 2
    for table in tables:
        assert tuple(key.value for key in table.keys if isinstance(key, ast.Constant)) == DEEP_EP_RANKS
