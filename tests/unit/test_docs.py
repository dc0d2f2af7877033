"""Holds the documentation: the site builds, its commands parse, its Python imports, and every path it names exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl import cli, compare, export, replay, samples
from megarl.knobs import UserError
from megarl.preflight.report import split_options
from tests.unit.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))])
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.M | re.S)  # indent, info string, body


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# --- the site --------------------------------------------------------------------------------------------------------


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_without_a_warning_and_holds_every_page(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert built == written | {"404.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    api = (site / "reference" / "engines.html").read_text(encoding="utf-8")
    assert 'id="megarl.actor.api.TrainEngine.train_batch"' in api  # read from the source, not only named


def test_the_navigation_names_every_page_once() -> None:
    pages = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(pages) > 30
    assert sorted(pages) == sorted(set(pages))


def test_a_page_loads_nothing_from_another_host(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=\"(?:https?:)?//")
    assert [name for name in site.rglob("*.html") if loads.search(name.read_text(encoding="utf-8"))] == []
    assert loads.search('<script async src="https://other.example/x.js">')
    assert re.search(r"@import|url\(['\"]?(?:https?:)?//", (DOCS / "stylesheets/site.css").read_text()) is None


BROKEN = {  # an addition to a page, and what the build says of it
    "[x](no_such_page.md)": "no_such_page.md",
    "[x](numbers.md#no-such-section)": "no-such-section",
    "[x][megarl.actor.engine.NoSuchEngine]": "NoSuchEngine",
    "![x](pictures/no_such.svg)": "no_such.svg",
}


@pytest.mark.long
def test_a_broken_link_ends_the_build(tmp_path: Path) -> None:
    shutil.copytree(DOCS, tmp_path / "docs")
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("megarl", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write("\n" + "\n".join(BROKEN) + "\n")
    (tmp_path / "docs" / "forgotten.md").write_text("# A page outside the navigation\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line]
    for says in [*BROKEN.values(), 'not included in the "nav"']:
        assert any(says in line for line in warnings), f"{says} is not reported: {warnings}"


# --- commands --------------------------------------------------------------------------------------------------------

COMMAND = re.compile(r"^(?:[A-Z_]+=\S* )*(?:\S*/)?python3? -m megarl\.(\S+)(.*)$")
TRAINS = ("train", "evaluate", "preflight", "launcher.local", "launcher.slurm", "launcher.ray", "launcher.server_task")
PLACEHOLDERS = {"NAME": "gsm8k_grpo"}  # of a recipe; other words in capitals stand for any path or value
OPTIONAL = re.compile(r"(?<!\S)\[[^\]]*\]")  # [SCRIPT.py], [--config FILE], [group=name ...]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Every megarl command in a page's fenced blocks: (module, arguments). Two spaces begin an explanation."""
    for _, info, body in FENCE.findall(text):
        if info.strip() not in ("", "bash", "sh", "shell", "console"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line.strip()):
                yield found[1], re.split(r"\s{2,}|\s#", found[2].strip())[0]


def check_command(module: str, arguments: str) -> None:
    """Composes and checks the overrides of a command, without running it. Raises what the command would raise."""
    assert importlib.util.find_spec(f"megarl.{module}") is not None, f"there is no megarl.{module}"
    words = shlex.split(OPTIONAL.sub("", arguments))
    words = [word for word in words if word != "..." and not word.endswith(".py")]
    if module in TRAINS:
        for option in ("--config", "--from-axolotl"):
            if option in words and not (ROOT / words[words.index(option) + 1]).is_file():
                del words[words.index(option) : words.index(option) + 2]
        pairs = (word.partition("=") for word in words)
        words = [f"{key}{mark}{PLACEHOLDERS.get(value, value)}" for key, mark, value in pairs]
        if module == "preflight":
            words, _ = split_options(words)
        if words := [word for word in words if word != "KNOB=VALUE"]:
            cli.load(cli.from_config_file(words)[0])
    elif module == "export":
        export.parse(words)
    elif module == "samples":
        assert words, samples.USAGE
        assert {word.partition("=")[0] for word in words[1:]} <= set(samples.OPTIONS), samples.USAGE
    elif module == "replay":
        replay.parse(words)
    elif module == "compare":
        compare.parse(words)
    elif module == "dashboard":
        assert len([word for word in words if "=" not in word]) <= 1
        assert {word.partition("=")[0] for word in words if "=" in word} <= {"port"}
    elif module in ("report", "launcher.status"):
        assert [word for word in words if "=" in word] == []
        assert module == "launcher.status" or len(words) == 1
    else:
        assert module == "doctor", f"python -m megarl.{module}: say in check_command what it takes"


@every_page
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for module, arguments in commands(page.read_text(encoding="utf-8")):
        try:
            check_command(module, arguments)
        except UserError as error:
            pytest.fail(f"{name_of(page)}: python -m megarl.{module} {arguments}: {error}")


def test_the_pages_have_commands_to_check() -> None:
    modules = [module for page in PAGES for module, _ in commands(page.read_text(encoding="utf-8"))]
    assert len(modules) > 25
    assert {"train", "preflight", "export", "launcher.local", "launcher.status"} <= set(modules)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("python -m megarl.train +experiment=gsm8k_grpo actor.pth=DIR", "unknown config key actor.pth"),
        ("python -m megarl.train +experiment=NAME algorithm.n_minibatches=3", "do not divide"),
        ("MEGARL_X=1 .venv/bin/python -m megarl.train +experiment=no_such   # says more", "no_such does not exist"),
        ("python -m megarl.preflight +experiment=NAME show=momery", "show=momery is not one of"),
        ("python -m megarl.export checkpoint=RUN outptu=DIR", "outptu"),
        ("python -m megarl.trian +experiment=NAME", "there is no megarl.trian"),
        ("python -m megarl.samples RUN stp=3", "usage"),
    ],
)
def test_a_command_that_is_wrong_is_found(line: str, message: str) -> None:
    ((module, arguments),) = commands(f"Text\n\n```\n{line}\n```\n")
    with pytest.raises((UserError, AssertionError), match=message):
        check_command(module, arguments)


# --- Python ----------------------------------------------------------------------------------------------------------


def python_problems(text: str) -> list[str]:
    """Blocks that do not compile, and imports from megarl that do not resolve. A page may import files it creates."""
    found = []
    created = {name.removesuffix(".py").replace("/", ".") for name in created_files(text) if name.endswith(".py")}
    for _, info, body in FENCE.findall(text):
        if info.split()[:1] != ["python"]:
            continue
        try:
            tree = ast.parse(body)
        except SyntaxError as error:
            found.append(f"does not compile: {error}")
            continue
        for node in ast.walk(tree):
            module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("megarl") and module not in created:
                found += [f"{module} has no {alias.name}" for alias in node.names if not resolves(module, alias.name)]
    return found


def resolves(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def created_files(text: str) -> set[str]:
    """Files that a page's blocks write or change: ```python megarl/ops/overlong.py"""
    return {info.split()[-1] for _, info, _ in FENCE.findall(text) if len(info.split()) > 1 and "/" in info.split()[-1]}


@every_page
def test_python_blocks_compile_and_import(page: Path) -> None:
    assert python_problems(page.read_text(encoding="utf-8")) == []


def test_python_that_is_wrong_is_found() -> None:
    page = "```python\n{}\n```\n"
    assert "does not compile" in python_problems(page.format("x ="))[0]
    assert python_problems(page.format("from megarl.types import PackedBtach")) == ["megarl.types has no PackedBtach"]
    assert python_problems(page.format("from megarl.tpyes import X")) == ["megarl.tpyes has no X"]
    assert python_problems("```python megarl/new.py\nX = 1\n```\n" + page.format("from megarl.new import X")) == []
    assert python_problems(page.format("from megarl.types import PackedBatch\nfrom megarl import cli")) == []


# --- paths -----------------------------------------------------------------------------------------------------------

PATH = re.compile(r"(?<![\w./:\-])((?:[\w.\-]+/)+[\w.\-]+\.(?:py|sh|md|cpp|cu|h))\b")
# Sources of libraries that docstrings cite, by their own paths.
PACKAGES = Path(importlib.util.find_spec("torch").origin or "").parents[1]  # type: ignore[union-attr]
CITED = (PACKAGES, PACKAGES / "megatron/core", PACKAGES / "megatron/core/transformer", PACKAGES / "sglang/srt")
PARTS = [path for path in (ROOT / "megarl").iterdir() if path.is_dir()]  # reshard's pages say plan/planner.py
ELSEWHERE = ("arealite/", "trl/", "verl/", "axolotl/")  # projects that are not installed here


def missing_paths(text: str, folder: Path, created: set[str]) -> list[str]:
    """Path-like mentions of files that are neither here, nor in a cited library, nor created by a guide."""
    text = FENCE.sub(lambda m: "" if len(m[2].split()) > 1 else m[0], text)  # a created file has its own test
    text = re.sub(r"\[[^\]]*\]\(https?://[^)]*\)|https?://\S+", "", text)
    roots = (ROOT, ROOT / "megarl", ROOT / "csrc", folder, *PARTS, *CITED)
    return [
        path
        for path in dict.fromkeys(PATH.findall(text))
        if not path.startswith(ELSEWHERE) and path not in created and not any((root / path).exists() for root in roots)
    ]


CREATED = set().union(*(created_files(page.read_text(encoding="utf-8")) for page in PAGES))


@every_page
def test_paths_in_pages_exist(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8"), page.parent, CREATED) == []


def test_paths_in_docstrings_exist() -> None:
    missing = {}
    for file in sorted((ROOT / "megarl").rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "body")]
        docs = [ast.get_docstring(n) or "" for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        if found := missing_paths("\n".join(docs), file.parent, CREATED):
            missing[name_of(file)] = found
    assert missing == {}


def test_a_path_that_is_missing_is_found() -> None:
    text = "See `megarl/actor/no_such.py`, ops/loss.py, tests/unit/test_docs.py:1 and https://x.y/a/b.py."
    assert missing_paths(text, ROOT, set()) == ["megarl/actor/no_such.py"]
    assert missing_paths("`tensor_parallel/layers.py:886`, `trl/x/y.py`", ROOT, set()) == []


# --- what pages say of the code --------------------------------------------------------------------------------------


def test_the_layers_of_the_page_are_those_that_imports_are_held_to() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    (drawing,) = re.findall(r"^```text layers\n(.*?)^```$", page, re.M | re.S)
    assert [set(line.split()) for line in drawing.splitlines()] == [set(row) for row in reversed(LAYERS)]


def test_the_folders_of_the_architecture_page_have_the_files_it_names() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (`megarl/\w+/`[^\n]*)\n(.*?)(?=^##)", page, re.M | re.S)
    assert len(sections) >= 6
    for title, body in sections:
        folders = [ROOT / folder for folder in re.findall(r"`(megarl/\w+/)`", title)]
        for name in re.findall(r"`(\w+\.py|\w+/)`", body):
            assert any(list(folder.rglob(name.strip("/"))) for folder in folders), f"{title} has no {name}"


def test_every_package_is_on_the_architecture_page() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "megarl").glob("*/__init__.py")}
    assert {name for name in packages if f"megarl/{name}/" not in page} == set()


def test_every_word_of_the_glossary_is_still_in_its_file() -> None:
    rows = [line for line in (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    places = [re.search(r"\| `([^`]+)` in `([^`]+)` \|$", row) for row in rows if not row.startswith("| Word ")]
    assert len(places) > 60
    for row, place in zip([row for row in rows if not row.startswith("| Word ")], places, strict=True):
        assert place is not None, f"no place: {row}"
        name, file = place.groups()
        assert (ROOT / file).is_file(), row
        assert name in (ROOT / file).read_text(), row
