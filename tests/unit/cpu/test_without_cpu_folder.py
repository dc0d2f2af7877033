"""Without `megarl/cpu` the package imports, and engines train on the torch layers: a GPU's path never enters it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# An editable install finds submodules in the checkout wherever their parent lies.
NO_EDITABLE_INSTALL = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__name__", type(f).__name__).lower()]
"""
IMPORT_ALL = """
import importlib.util, pkgutil, megarl
assert importlib.util.find_spec("megarl.cpu") is None
names = [m.name for m in pkgutil.walk_packages(megarl.__path__, "megarl.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules of", megarl.__path__[0])
"""
# Engines, heads, weights, checkpoints and batches on the backend that `auto` chooses then: torch.
UNIT_TESTS = ("actor/test_engine.py", "actor/test_critic.py", "actor/test_policy.py", "actor/test_hf_weights.py")


@pytest.fixture(scope="module")
def package_without_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package from which the folder was deleted."""
    root = tmp_path_factory.mktemp("without_cpu")
    hidden = ROOT / "megarl" / "cpu"

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "__pycache__" or Path(folder, name) == hidden]

    shutil.copytree(ROOT / "megarl", root / "megarl", ignore=left_out)
    for name in ("configs", "assets", "slurm"):
        (root / name).symlink_to(ROOT / name)
    (root / "sitecustomize.py").write_text(NO_EDITABLE_INSTALL)
    assert not (root / "megarl" / "cpu").exists()
    return root


def run(package: Path, *arguments: str) -> str:
    here = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=here, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_every_module_imports(package_without_cpu: Path) -> None:
    printed = run(package_without_cpu, "-P", "-W", "ignore", "-c", IMPORT_ALL)
    assert f"modules of {package_without_cpu}" in printed


@pytest.mark.long
def test_engines_train_and_checkpoint(package_without_cpu: Path) -> None:
    tests = [str(ROOT / "tests" / "unit" / name) for name in UNIT_TESTS]
    printed = run(package_without_cpu, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert " passed" in printed
    assert "failed" not in printed


def test_a_server_without_a_gpu_is_refused_in_one_line(package_without_cpu: Path) -> None:
    script = (
        "from megarl.rollout.servers.server_config import SGLangServerConfig, choose_platform\n"
        "try: choose_platform(SGLangServerConfig(device='cpu'), {}, False)\n"
        "except ValueError as error: print(error)"
    )
    message = "SGLang runs on CPU by the folder megarl/cpu, which is missing"
    assert message in run(package_without_cpu, "-P", "-c", script)
