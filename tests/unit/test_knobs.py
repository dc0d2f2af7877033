"""Holds the rule of one owner per knob, with a meaning, a reader and a row in the reference. No YAML key is unowned."""

import ast
import dataclasses
import importlib.util
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megarl.config import Config
from megarl.knobs import knob

ROOT = Path(__file__).parents[2]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


reference = load_generator()


def knobs_of(root: type) -> dict[str, tuple[type, dataclasses.Field]]:
    """Every field under a dataclass, values and parts, by its full path."""
    found = {}
    for section in reference.sections(root):
        for item in [*section.knobs, *section.parts]:
            found[section.path(item.name)] = (section.owner, item)
    return found


def without_meaning(root: type) -> list[str]:
    return [path for path, (_, item) in knobs_of(root).items() if not item.metadata.get("meaning", "").strip()]


def not_frozen(root: type) -> set[str]:
    return {s.owner.__name__ for s in reference.sections(root) if not s.owner.__dataclass_params__.frozen}


def attributes_read(sources: list[str]) -> set[str]:
    """Names of the attributes that code reads, `getattr(x, "name")` among them."""
    read = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            read |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return read


def yaml_keys(values: Any, package: str) -> list[str]:
    """Full paths of the keys in a YAML file of a Hydra group; `package` is where Hydra puts it."""
    keys = []
    for key, value in (values or {}).items():
        path = f"{package}.{key}" if package else str(key)
        keys += yaml_keys(value, path) if isinstance(value, dict) and value else [path]
    return keys


def package_of(path: Path, text: str, root: Path) -> str:
    """Hydra's rule: the `# @package` line, else the folder. `_global_` is the root."""
    group = ".".join(path.relative_to(root).parts[:-1])
    first = text.split("\n", 1)[0]
    package = first.removeprefix("# @package ").strip() if first.startswith("# @package ") else group
    return package.replace("_group_", group).removeprefix("_global_").strip(".")


def is_owned(path: str, root: type) -> bool:
    """True if a key belongs to a field. Under a `dict` field any key does."""
    name, _, rest = path.partition(".")
    hints = typing.get_type_hints(root)
    if name not in hints:
        return False
    if parts := reference.parts_of(root, name):
        return not rest or any(is_owned(rest, part) for part in parts)
    return not rest or dict in (hints[name], typing.get_origin(hints[name]))


def strays(configs: Path, root: type) -> list[str]:
    """YAML keys without an owner, as `file: key`."""
    found = []
    for path in sorted(configs.rglob("*.yaml")):
        text = path.read_text()
        values = {k: v for k, v in (yaml.safe_load(text) or {}).items() if k not in {"defaults", "hydra"}}
        for key in yaml_keys(values, package_of(path, text, configs)):
            if not is_owned(key, root):
                found.append(f"{path.relative_to(configs)}: {key}")
    return found


def test_every_knob_says_what_it_means():
    assert len(knobs_of(Config)) > 20
    assert without_meaning(Config) == []


def test_every_config_dataclass_is_frozen():
    assert not_frozen(Config) == set()


def test_every_knob_is_read_somewhere():
    sources = [path.read_text() for path in (ROOT / "megarl").rglob("*.py")]
    read = attributes_read(sources)
    assert [path for path in knobs_of(Config) if path.split(".")[-1] not in read] == []


def test_every_key_in_yaml_has_an_owner():
    configs = ROOT / "configs"
    assert len(list(configs.rglob("*.yaml"))) > 1
    assert strays(configs, Config) == []


def test_the_configuration_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference.render(Config), "run: python docs/make_configuration.py"


@dataclasses.dataclass(frozen=True)
class Inner:
    """An inner part."""

    rate: float = knob(1e-6, "how fast", above=0, most=10**6)
    names: list[str] = knob(meaning="who | whom", factory=list)
    extra: dict[str, Any] = knob(meaning="anything", factory=dict)


@dataclasses.dataclass(frozen=True)
class Base:
    """Knobs of both kinds."""

    shared: int = knob(1, "of both")


@dataclasses.dataclass(frozen=True)
class KindA(Base):
    """One kind."""

    only_a: int = knob(1, "of A")


@dataclasses.dataclass(frozen=True)
class KindB(Base):
    """Another kind."""

    only_b: int = knob(1, "of B")


@dataclasses.dataclass
class Outer:
    """The whole, in one line

    and more."""

    path: str = knob(meaning="needed")
    inner: Inner = knob(factory=Inner, meaning="the part")
    maybe: Inner | None = knob(None, "a part or none")
    kind: Base = knob(factory=KindA, meaning="one of two")
    bare: bool = True


def test_the_page_shows_path_type_default_meaning_and_owner():
    page = reference.render(Outer)
    assert "## The root\n\nThe whole, in one line. Owner: `Outer`" in page
    assert "## `kind`\n\nKnobs of both kinds." in page
    assert "## `kind`: KindA\n\nOne kind." in page
    assert "| `path` | `str` | required |  | needed |" in page
    assert "| `inner.rate` | `float` | `1e-06` | above 0 and at most 1,000,000 | how fast |" in page
    assert r"| `inner.names` | `list[str]` | `[]` |  | who \| whom |" in page
    assert "| `maybe.rate` |" in page
    assert "| `kind.only_a` |" in page
    assert "| `kind.only_b` |" in page
    assert page.count("| `kind.shared` |") == 1
    assert "| `bare` | `bool` | `true` |  |" in page


def test_the_checks_find_what_breaks_a_rule(tmp_path: Path):
    assert without_meaning(Outer) == ["bare"]
    assert not_frozen(Outer) == {"Outer"}
    assert attributes_read(["x = c.lr\nc.unread = 1\ngetattr(c, 'named')"]) == {"lr", "named"}
    for name, text in {
        "config.yaml": "defaults: [_self_]\nhydra: {x: 1}\npath: a\nghost: 1\ninner: {rate: 1, rat: 2}\n",
        "inner/fast.yaml": "rate: 1\nspeed: 2\nextra: {any: {thing: 1}}\nnames: [a]\n",
        "experiment/demo.yaml": "# @package _global_\ndefaults: []\nmaybe: {rate: 1, names: {a: 1}}\nmaybee: {}\n",
        "other/x.yaml": "# @package maybe\nrates: 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert strays(tmp_path, Outer) == [
        "config.yaml: ghost",
        "config.yaml: inner.rat",
        "experiment/demo.yaml: maybe.names.a",
        "experiment/demo.yaml: maybee",
        "inner/fast.yaml: inner.speed",
        "other/x.yaml: maybe.rates",
    ]


@pytest.mark.parametrize("path", ["path", "inner.extra.a.b", "maybe.rate", "inner", "kind.only_b", "kind.shared"])
def test_a_key_with_an_owner_passes(path: str):
    assert is_owned(path, Outer)
