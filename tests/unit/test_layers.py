"""Holds the layers: imports go down, libraries have few importers, nothing imports in a circle, files stay short."""

import ast
import collections
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

# From the bottom up. A module imports from lower rows only, never from another part of its own row.
LAYERS = (
    {"knobs", "processes", "versions", "sandbox", "device_copies"},
    {"types", "hub", "forks"},
    {"families"},
    {"ops", "parallel", "observe", "environments"},
    {"cpu"},
    {"data", "rollout", "rewards", "algorithms", "actor", "reshard"},
    {"config"},
    {"teacher_checks", "served_checks", "gpu_checks"},
    {"checks"},
    {"foreign"},
    {"axolotl"},
    {"other_trainers"},
    {"cli"},
    {"areal"},
    {"trainer"},
    {"launcher"},
    {"preflight"},
    {"train", "evaluate", "doctor", "export", "report", "samples", "dashboard", "serve", "replay", "compare"},
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
PACKAGE_LEVEL = LEVEL["families"]  # of megarl/__init__.py, whose names are loaded when they are used

# Inside a part: its files and folders from the bottom up. Each imports from lower ones and from itself.
INSIDE = {
    "reshard": ("config", "plan", "transfer", "sync", "session"),
    "sandbox": ("system_calls", "isolation", "activity", "judge", "server", "client", "programs"),
}

# Importers of a library: parts of megarl, or folders in them.
KNOWERS = {
    "megarl._C": {"ops", "cpu"},
    "megatron": {"actor", "parallel", "cpu"},
    "sglang": {"cpu", "reshard/sync", "rollout/servers/guarded_launch"},
    "hydra": {"cli"},
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
            if function in {"import_module", "__import__"} and (name := constant_name(node.args[0])):
                yield node.lineno, name


def constant_name(argument: ast.expr) -> str:
    """The module name in an argument: a string, or the constant beginning of an f-string; "" if there is none.

    `f"megarl.actor.{name}"` -> `megarl.actor`; `f"megarl.{name}"` -> `megarl.?`, a part that nobody can check.
    """
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    if not isinstance(argument, ast.JoinedStr) or not isinstance(argument.values[0], ast.Constant):
        return ""
    known = str(argument.values[0].value).rpartition(".")[0]
    return f"{known}.?" if known == "megarl" else known


def is_or_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def problems(path: str, source: str) -> list[str]:
    """Rules that one file of megarl breaks, given its path from the root and its text."""
    tree, found = ast.parse(source), []
    if "utils" in Path(path).with_suffix("").parts:
        found.append(f"{path}: nothing is called utils; name it after its content")
    if part_of(path) != "__init__" and part_of(path) not in LEVEL:
        found.append(f"{path}: megarl.{part_of(path)} is in no layer; add it to LAYERS and to CONTRIBUTING.md")
    for line, name in imports(path, tree):
        found += [f"{path}:{line}: {text}" for text in (*libraries(path, name), *layers(path, name))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def libraries(path: str, name: str) -> Iterator[str]:
    """Objections to a library's import."""
    inside = path.removeprefix("megarl/").removesuffix(".py")
    for library, knowers in KNOWERS.items():
        if is_or_in(name, library) and not any(inside == known or inside.startswith(f"{known}/") for known in knowers):
            yield f"imports {library}, which only {', '.join(sorted(knowers))} may"


def layers(path: str, name: str) -> Iterator[str]:
    """Objections to an import of megarl's own modules."""
    part, names = part_of(path), name.split(".")
    if names[0] != "megarl" or len(names) < 2 or names[1] in {"_C", "__version__"}:
        return
    if names[1] == "?":
        yield "imports a part of megarl by a name that only exists at run time; write the part out"
    elif names[1] == part:
        yield from inner_layers(path, names)
    elif names[1] not in LEVEL:
        yield f"imports {name}, which is in no layer"
    elif part in LEVEL and LEVEL[names[1]] == LEVEL[part]:
        yield f"{part} imports its sibling {names[1]}; the layer above hands it what it needs"
    elif LEVEL[names[1]] > LEVEL.get(part, PACKAGE_LEVEL):
        yield f"{part} imports {names[1]}, which is above it"


def inner_layers(path: str, names: list[str]) -> Iterator[str]:
    """Objections to an import inside a part that has layers of its own."""
    order, places = INSIDE.get(part_of(path), ()), Path(path).with_suffix("").parts
    here, there = places[2] if len(places) > 2 else "", names[2] if len(names) > 2 else ""
    if here in order and there in order and order.index(there) > order.index(here):
        yield f"{here} imports {there}, which is above it in {part_of(path)}"


def cycles(sources: Mapping[str, str]) -> list[str]:
    """Circles of imports, given all files of megarl by path: between its parts, and between the files of a part."""
    parts: dict[str, set[str]] = {}
    files: dict[str, set[str]] = {}
    for path, source in sources.items():
        for _, name in imports(path, ast.parse(source)):
            target = file_of(name, sources)
            if target is None or target == path:
                continue
            if part_of(target) == part_of(path):
                files.setdefault(path, set()).add(target)
            elif "__init__" not in (part_of(target), part_of(path)):
                parts.setdefault(part_of(path), set()).add(part_of(target))
    circles = [circle(graph) for graph in (parts, files)]
    return [f"imports go in a circle: {' -> '.join(names)}" for names in circles if names]


def file_of(name: str, files: Iterable[str]) -> str | None:
    """The file of megarl that an imported name lies in: `megarl.trainer.rl.train` -> `megarl/trainer/rl.py`."""
    names = name.split(".")
    for length in range(len(names), 0, -1):
        stem = "/".join(names[:length])
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in files:
                return path
    return None


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """A path that ends where it began; [] if the graph has none."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return []
        for following in sorted(graph.get(node, ())):
            if found := visit(following, [*path, node]):
                return found
        finished.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def python_files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "megarl").rglob("*.py"))


@pytest.mark.parametrize("path", python_files())
def test_a_module_keeps_to_its_layer(path: str):
    assert problems(path, (ROOT / path).read_text()) == []


def test_no_imports_go_in_a_circle():
    sources = {path: (ROOT / path).read_text() for path in python_files()}
    assert len(sources) > 200
    assert cycles(sources) == []


def test_every_part_of_the_layers_exists():
    parts = {part_of(path) for path in python_files()}
    assert set(LEVEL) - parts <= {"cpu"}  # which may be removed


def test_no_file_is_longer_than_a_reader_can_hold():
    folders = ("megarl", "csrc", "tests", "benchmarks", "docs")
    suffixes = {".py", ".cpp", ".cu", ".cuh", ".h"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert lengths["tests/unit/test_layers.py"] > 100  # the walk found this very file
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_a_class_name_stands_once_in_the_package():
    places = collections.defaultdict(list)
    for path in (ROOT / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT))
    assert len(places["MegatronEngine"]) == 1  # the walk found the classes
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


BAD = [
    ("megarl/ops/loss.py", "from megarl.actor.engine import TrainEngine", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "def f():\n    import megarl.actor", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "from megarl import trainer", "ops imports trainer, which is above it"),
    ("megarl/ops/loss.py", "from ..actor import engine", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "from .. import actor", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "from megarl.cpu import layer_ops", "ops imports cpu, which is above it"),
    ("megarl/rollout/workflows/rlvr.py", "from ...rewards import gsm8k", "rollout imports its sibling rewards"),
    ("megarl/rollout/api.py", "if TYPE_CHECKING:\n    from megarl.data import x", "rollout imports its sibling data"),
    ("megarl/ops/loss.py", "from megarl.parallel import groups", "ops imports its sibling parallel"),
    ("megarl/config.py", "from megarl.trainer import rl", "config imports trainer, which is above it"),
    ("megarl/config.py", "from megarl.checks import run_all", "config imports checks, which is above it"),
    ("megarl/cli.py", "from megarl.launcher import local", "cli imports launcher, which is above it"),
    ("megarl/trainer/run.py", "from megarl import preflight", "trainer imports preflight, which is above it"),
    ("megarl/launcher/local.py", "from megarl import preflight", "launcher imports preflight, which is above it"),
    ("megarl/launcher/server_task.py", "from megarl import train", "launcher imports train, which is above it"),
    ("megarl/samples.py", "from megarl.report import main", "samples imports its sibling report"),
    ("megarl/knobs.py", "import megarl.types", "knobs imports types, which is above it"),
    ("megarl/types.py", "import megarl.config", "types imports config, which is above it"),
    ("megarl/actor/engine.py", "from megarl.config import Config", "actor imports config, which is above it"),
    ("megarl/__init__.py", "from megarl.ops import loss", "__init__ imports ops, which is above it"),
    ("megarl/trainer/rl.py", "from megarl.ghost import x", "imports megarl.ghost.x, which is in no layer"),
    ("megarl/ghost.py", "x = 1", "megarl.ghost is in no layer"),
    ("megarl/actor/engine.py", "from megarl import _C", "imports megarl._C, which only cpu, ops may"),
    ("megarl/actor/engine.py", "import megarl._C as c", "imports megarl._C, which only cpu, ops may"),
    ("megarl/trainer/rl.py", "from megatron.core import mpu", "imports megatron, which only actor, cpu, parallel may"),
    ("megarl/trainer/rl.py", "importlib.import_module('megatron.core')", "imports megatron, which only"),
    ("megarl/trainer/rl.py", "__import__(f'megatron.core.{name}')", "imports megatron, which only"),
    ("megarl/ops/loss.py", "import_module('megarl.actor.engine')", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "import_module(f'megarl.actor.{name}')", "ops imports actor, which is above it"),
    ("megarl/ops/loss.py", "import_module(f'megarl.{name}')", "by a name that only exists at run time"),
    ("megarl/trainer/rl.py", "def f():\n    import hydra", "imports hydra, which only cli may"),
    ("megarl/train.py", "import hydra", "imports hydra, which only cli may"),
    (
        "megarl/rollout/api.py",
        "import sglang",
        "imports sglang, which only cpu, reshard/sync, rollout/servers/guarded_launch may",
    ),
    (
        "megarl/reshard/session.py",
        "import sglang.srt",
        "imports sglang, which only cpu, reshard/sync, rollout/servers/guarded_launch may",
    ),
    (
        "megarl/reshard/synchrony.py",
        "import sglang",
        "imports sglang, which only cpu, reshard/sync, rollout/servers/guarded_launch may",
    ),
    ("megarl/reshard/plan/x.py", "from megarl.reshard.transfer import store", "plan imports transfer, which is above"),
    ("megarl/reshard/transfer/x.py", "from ..sync import world", "transfer imports sync, which is above it in reshard"),
    ("megarl/reshard/sync/x.py", "from megarl.reshard import session", "sync imports session, which is above it in"),
    ("megarl/reshard/config.py", "from megarl.reshard.plan import x", "config imports plan, which is above it in"),
    ("megarl/data/utils.py", "x = 1", "nothing is called utils"),
    ("megarl/utils/text.py", "x = 1", "nothing is called utils"),
    ("megarl/knobs.py", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines, at most 80"),
]
GOOD = [
    ("megarl/train.py", "from megarl.trainer import rl\nfrom megarl import cli"),
    ("megarl/cli.py", "import hydra\nfrom megarl.axolotl import read\nfrom megarl.checks import run_all"),
    (
        "megarl/trainer/rl.py",
        "from megarl.actor.engine import TrainEngine\nfrom megarl.config import Config\nfrom . import x",
    ),
    ("megarl/actor/engine.py", "import megatron.core\nfrom megarl.ops import loss\nfrom .model import build"),
    ("megarl/actor/model/build.py", "from megarl.cpu import layers\nimport_module(f'megarl.actor.model.{name}')"),
    ("megarl/cpu/layers.py", "import megatron.core, sglang\nfrom megarl.ops import loss"),
    ("megarl/reshard/sync/sglang_hooks.py", "import sglang\nfrom megarl.types import PackedBatch"),
    ("megarl/reshard/session.py", "from megarl.reshard.sync import world\nfrom megarl.reshard.plan import planner"),
    ("megarl/reshard/transfer/x.py", "from . import store\nfrom megarl.reshard import config, plan"),
    ("megarl/ops/loss.py", "from megarl import _C\nfrom megarl import __version__"),
    ("megarl/launcher/server_task.py", "from megarl import cli\nfrom megarl.rollout import supervisor"),
    ("megarl/preflight/report.py", "from megarl.launcher import slurm\nfrom megarl.trainer import batch_algebra"),
    ("megarl/knobs.py", "importlib.import_module(module)\nimportlib.import_module(f'{module}.x')"),
    ("megarl/data/x.py", "import megatronic, hydrate"),
    ("megarl/knobs.py", "def f():\n" + "    x = 1\n" * 79),
]


@pytest.mark.parametrize(("path", "source", "message"), BAD)
def test_the_check_finds_a_broken_rule(path: str, source: str, message: str):
    found = problems(path, source)
    assert len(found) >= 1
    assert message in found[0]


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_the_check_passes_files_that_keep_the_rules(path: str, source: str):
    assert problems(path, source) == []


IN_CIRCLES = [
    (
        {"megarl/ops/a.py": "from megarl.parallel import b", "megarl/parallel/b.py": "import megarl.ops.a"},
        "ops -> parallel -> ops",
    ),
    (
        {
            "megarl/ops/a.py": "import megarl.types",
            "megarl/types.py": "def f():\n    from megarl.knobs import x",
            "megarl/knobs.py": "importlib.import_module('megarl.ops.a')",
        },
        "knobs -> ops -> types -> knobs",
    ),
    (
        {"megarl/actor/a.py": "from megarl.actor.b import x", "megarl/actor/b.py": "from . import a"},
        "megarl/actor/a.py -> megarl/actor/b.py -> megarl/actor/a.py",
    ),
    (
        {"megarl/actor/__init__.py": "from megarl.actor.a import x", "megarl/actor/a.py": "from megarl.actor import x"},
        "megarl/actor/__init__.py -> megarl/actor/a.py -> megarl/actor/__init__.py",
    ),
]
STRAIGHT = [
    {"megarl/ops/a.py": "from megarl.types import x", "megarl/types.py": "from megarl.knobs import y"},
    {
        "megarl/actor/__init__.py": "from megarl.actor.a import x",
        "megarl/actor/a.py": "from megarl.actor.b import x\nfrom megarl.actor import c",
        "megarl/actor/b.py": "from megarl.actor.c import y",
        "megarl/actor/c.py": "import torch",
    },
]


@pytest.mark.parametrize(("sources", "message"), IN_CIRCLES)
def test_the_check_finds_a_circle_of_parts_or_files(sources: dict[str, str], message: str):
    assert cycles(sources) == [f"imports go in a circle: {message}"]


@pytest.mark.parametrize("sources", STRAIGHT)
def test_the_check_passes_imports_without_a_circle(sources: dict[str, str]):
    assert cycles(sources) == []
