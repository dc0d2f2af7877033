"""Writes docs/configuration.md from the dataclasses that own the knobs: `python docs/make_configuration.py`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, is_dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("configuration.md")
HEADER = """# Configuration

<!-- Written by `python docs/make_configuration.py` from the dataclasses. Change those, not this page. -->

Every knob has one owner: a frozen dataclass beside the code that reads it. YAML files in `configs/` and the command
line hold differences from these defaults:

```
python -m megarl.train +experiment=gsm8k_grpo actor.optimizer.lr=1e-4
```

An unknown key is refused with the nearest known name, and a value outside its range with the range: one line, exit
code 2. Numbers must be finite. The range of a list is that of each entry. `required` marks a knob without a default.
"""


@dataclass(frozen=True)
class Section:
    """One dataclass at one place of the configuration."""

    prefix: str  # its path, such as "actor.optimizer"; "" at the root
    owner: type  # the dataclass
    knobs: list[dataclasses.Field] = field(default_factory=list)  # fields with values
    parts: list[dataclasses.Field] = field(default_factory=list)  # fields with dataclasses

    def path(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


def sections(owner: type, prefix: str = "") -> Iterator[Section]:
    """Yields a dataclass with its own knobs, then all dataclasses inside it, depth first."""
    section, inside = Section(prefix, owner), []
    for knob in (knob for knob in dataclasses.fields(owner) if knob.name in inspect.get_annotations(owner)):
        kinds = parts_of(owner, knob.name)
        (section.parts if kinds else section.knobs).append(knob)
        inside += [(kind, section.path(knob.name)) for kind in kinds]
    yield section
    for kind, path in inside:
        yield from sections(kind, path)


def parts_of(owner: type, name: str) -> list[type]:
    """Dataclasses that a field may hold, subclasses included; [] for a plain value."""
    hint = typing.get_type_hints(owner)[name]
    bases = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and is_dataclass(kind)]
    return [kind for base in bases for kind in (base, *_below(base))]


def _below(base: type) -> list[type]:
    """All subclasses in the base's own package; classes with subclasses of their own come first.

    Those elsewhere are no choices of a knob: `megarl/areal.py` has one, and so may a user's code.
    """
    package = base.__module__.rpartition(".")[0]
    inside = [kind for kind in base.__subclasses__() if kind.__module__.rpartition(".")[0] == package]
    below = dict.fromkeys(kind for subclass in inside for kind in (subclass, *_below(subclass)))
    return sorted(below, key=lambda kind: (-len(_below(kind)), kind.__name__))


def render(root: type) -> str:
    """Renders the page of a root dataclass."""
    lines, seen = [HEADER], set()
    for section in sections(root):
        if not section.knobs:
            continue
        kind = f": {section.owner.__name__.removesuffix('Config')}" if section.prefix in seen else ""
        seen.add(section.prefix)
        lines += [f"## {f'`{section.prefix}`' if section.prefix else 'The root'}{kind}", ""]
        lines += [f"{_first_line(section.owner)} Owner: `{section.owner.__name__}` in `{_file(section.owner)}`.", ""]
        lines += ["| Knob | Type | Default | Range | Meaning |", "|---|---|---|---|---|"]
        lines += [_row(section, knob) for knob in section.knobs]
        lines.append("")
    return "\n".join(lines)


def _row(section: Section, knob: dataclasses.Field) -> str:
    kind = knob.type if isinstance(knob.type, str) else inspect.formatannotation(knob.type)
    meaning, values = knob.metadata.get("meaning", ""), str(knob.metadata.get("range", ""))
    cells = [f"`{section.path(knob.name)}`", f"`{kind}`", _default(knob), values, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(knob: dataclasses.Field) -> str:
    """The default in YAML's notation."""
    if knob.default_factory is not MISSING:
        value = knob.default_factory()
    elif knob.default is not MISSING:
        value = knob.default
    else:
        return "required"
    return f"`{value!r}`" if isinstance(value, float) else f"`{json.dumps(value, ensure_ascii=False)}`"


def _first_line(owner: type) -> str:
    line = (inspect.getdoc(owner) or "").split("\n")[0]
    return line if line.endswith(".") else line + "."


def _file(owner: type) -> str:
    return owner.__module__.replace(".", "/") + ".py"


def main() -> None:
    from megarl.config import Config

    PAGE.write_text(render(Config), encoding="utf-8")
    print(f"{PAGE.name}: {sum(len(section.knobs) for section in sections(Config))} knobs")


if __name__ == "__main__":
    main()
