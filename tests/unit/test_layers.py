"""Holds the layers: who may import whom, who may know which library, and how long files and functions may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

# From the bottom up. A module imports from lower rows only, never from another of its own row.
LAYERS = (
    {"knobs", "processes", "sandbox_child", "versions"},
    {"types", "sandbox"},
    {"ops", "parallel", "observe"},
    {"data", "rollout", "rewards", "algorithms", "actor", "reshard", "launcher"},
    {"config"},
    {"trainer", "axolotl"},
    {"cli"},
    {"train", "evaluate", "preflight", "doctor", "export", "report", "samples"},
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
JOINS = {("config", "trainer")}  # the root of the configuration joins the trainer's knobs to those of the stages
# Commands beside a stage's knobs.
LAUNCHERS = {f"launcher/{name}.py" for name in ("local", "ray", "server", "slurm", "status")}
BELOW_LAUNCHERS = {"cli", "config", "trainer", "rollout", "reshard", "actor"}  # they compose what they start
COMMANDS = LAYERS[-1] | LAYERS[-2]

# Who may know a library: parts of megarl, or single files.
KNOWERS = {
    "megarl._C": {"ops"},
    "megatron": {"actor", "parallel"},
    "hydra": COMMANDS,
    "sglang": {"rollout", "reshard/sync/sglang_hooks.py"},
}


def part_of(path: str) -> str:
    """`megarl/actor/engine.py` -> `actor`; `megarl/train.py` -> `train`; `megarl/__init__.py` -> `__init__`."""
    return Path(path).parts[1].removesuffix(".py")


def imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, as (line, full name): anywhere in it, relative ones and by name too."""
    package = list(Path(path).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and node.args:
            function = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if function in {"import_module", "__import__"} and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def is_or_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def problems(path: str, source: str) -> list[str]:
    """What is wrong with one file of megarl, given as its path from the root and its text."""
    tree, part, found = ast.parse(source), part_of(path), []
    inside = path.removeprefix("megarl/")
    if "utils" in Path(path).with_suffix("").parts:
        found.append(f"{path}: nothing is called utils; name it after what it does")
    if part != "__init__" and part not in LEVEL:
        found.append(f"{path}: megarl.{part} is in no layer; add it to LAYERS and to DESIGN's list")
    for line, name in imports(path, tree):
        for library, knowers in KNOWERS.items():
            if is_or_in(name, library) and part not in knowers and inside not in knowers:
                found.append(f"{path}:{line}: imports {library}, which only {', '.join(sorted(knowers))} may")
        names = name.split(".")
        if names[0] != "megarl" or len(names) < 2 or names[1] in {part, "_C", "__version__"}:
            continue
        if (part, names[1]) in JOINS or (inside in LAUNCHERS and names[1] in BELOW_LAUNCHERS):
            continue
        if names[1] not in LEVEL:
            found.append(f"{path}:{line}: imports {name}, which is in no layer")
        elif part in LEVEL and LEVEL[names[1]] == LEVEL[part]:
            found.append(
                f"{path}:{line}: {part} imports its sibling {names[1]}; the layer above hands it what it needs"
            )
        elif LEVEL[names[1]] > LEVEL.get(part, 0):
            found.append(f"{path}:{line}: {part} imports {names[1]}, which is above it")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def python_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "megarl").rglob("*.py"))


@pytest.mark.parametrize("path", python_files())
def test_a_module_keeps_to_its_layer(path: str):
    assert problems(path, (ROOT / path).read_text()) == []


def test_no_file_is_longer_than_a_reader_can_hold():
    folders = ("megarl", "csrc", "tests", "benchmarks", "docs")
    suffixes = {".py", ".cpp", ".cu", ".cuh", ".h"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert lengths["tests/unit/test_layers.py"] > 100  # the walk found this very file
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


BAD = [
    ("megarl/ops/loss.py", "from megarl.actor.engine import TrainEngine", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "def f():\n    import megarl.actor", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "from megarl import trainer", "ops imports trainer, which is above it"),
    ("megarl/ops/loss.py", "from ..actor import engine", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "from .. import actor", "ops imports actor, which is above it"),
    ("megarl/rollout/workflows/rlvr.py", "from ...rewards import gsm8k", "rollout imports its sibling rewards"),
    ("megarl/rollout/api.py", "if TYPE_CHECKING:\n    from megarl.data import x", "rollout imports its sibling data"),
    ("megarl/ops/loss.py", "from megarl.parallel import groups", "ops imports its sibling parallel"),
    ("megarl/launcher/config.py", "from megarl import cli", "launcher imports cli, which is above it"),
    ("megarl/launcher/server_task.py", "from megarl import train", "launcher imports train, which is above it"),
    ("megarl/knobs.py", "import megarl.types", "knobs imports types, which is above it"),
    ("megarl/types.py", "import megarl.config", "types imports config, which is above it"),
    ("megarl/actor/engine.py", "from megarl.config import Config", "actor imports config, which is above it"),
    ("megarl/__init__.py", "from megarl.ops import loss", "__init__ imports ops, which is above it"),
    ("megarl/trainer/rl.py", "from megarl.ghost import x", "imports megarl.ghost.x, which is in no layer"),
    ("megarl/ghost.py", "x = 1", "megarl.ghost is in no layer"),
    ("megarl/actor/engine.py", "from megarl import _C", "imports megarl._C, which only ops may"),
    ("megarl/actor/engine.py", "import megarl._C as c", "imports megarl._C, which only ops may"),
    ("megarl/trainer/rl.py", "from megatron.core import mpu", "imports megatron, which only actor, parallel may"),
    ("megarl/trainer/rl.py", "importlib.import_module('megatron.core')", "imports megatron, which only"),
    ("megarl/trainer/rl.py", "def f():\n    import hydra", "imports hydra, which only"),
    (
        "megarl/reshard/session.py",
        "import sglang.srt",
        "imports sglang, which only reshard/sync/sglang_hooks.py, rollout may",
    ),
    ("megarl/data/utils.py", "x = 1", "nothing is called utils"),
    ("megarl/utils/text.py", "x = 1", "nothing is called utils"),
    ("megarl/knobs.py", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines, at most 80"),
]
GOOD = [
    ("megarl/train.py", "import hydra\nfrom megarl.trainer import rl\nfrom megarl import cli"),
    (
        "megarl/trainer/rl.py",
        "from megarl.actor.engine import TrainEngine\nfrom megarl.config import Config\nfrom . import x",
    ),
    ("megarl/actor/engine.py", "import megatron.core\nfrom megarl.ops import loss\nfrom .model import build"),
    ("megarl/reshard/sync/sglang_hooks.py", "import sglang\nfrom megarl.types import PackedBatch"),
    ("megarl/ops/loss.py", "from megarl import _C\nfrom megarl import __version__"),
    ("megarl/launcher/server_task.py", "from megarl import cli\nfrom megarl.rollout import supervisor"),
    ("megarl/data/x.py", "import megatronic, hydrate"),
    ("megarl/knobs.py", "def f():\n" + "    x = 1\n" * 79),
]


@pytest.mark.parametrize(("path", "source", "message"), BAD)
def test_the_check_finds_what_breaks_a_rule(path: str, source: str, message: str):
    found = problems(path, source)
    assert len(found) >= 1
    assert message in found[0]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_the_check_lets_pass_what_keeps_the_rules(path: str, source: str):
    assert problems(path, source) == []
