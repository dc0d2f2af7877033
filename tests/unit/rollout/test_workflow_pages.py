"""docs/workflows/: the commands are accepted, the tables hold every knob with its default, the Python runs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conversations import GCONFIG

from megarl import cli
from megarl.rollout.config import RolloutConfig
from megarl.rollout.workflows.choose import WORKFLOWS, build_workflow, check_imports

PAGES = Path(__file__).parents[3] / "docs" / "workflows"
DATA = {"messages": [{"role": "user", "content": "Leo has 7 pens."}], "answer": "#### 7"}


@pytest.fixture(autouse=True)
def files_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with the files that the pages show."""
    names = []
    for page in PAGES.glob("*.md"):
        for name, source in re.findall(r"^```python (\S+)\n(.*?)^```$", page.read_text(), re.M | re.S):
            (tmp_path / name).write_text(source)
            names.append(name.removesuffix(".py"))
    assert sorted(names) == ["my_agent", "my_tools"]
    monkeypatch.chdir(tmp_path)
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


def commands(page: str) -> list[list[str]]:
    """Arguments of the page's training commands."""
    return [
        command.split() for command in re.findall(r"^python -m megarl\.train (.*)$", (PAGES / page).read_text(), re.M)
    ]


def test_every_workflow_has_a_page_with_a_command_that_chooses_it() -> None:
    assert sorted(page.stem for page in PAGES.glob("*.md")) == sorted(WORKFLOWS)
    for name in WORKFLOWS:
        assert commands(f"{name}.md")
        for command in commands(f"{name}.md"):
            config = cli.load(command)
            assert config.rollout.workflow == name
            if name != "environment":  # its packages are not here; test_adapters.py plays them
                check_imports(config.rollout)


@pytest.mark.parametrize("name", ["multi_turn", "tool_use", "agent", "environment"])
def test_a_page_has_every_knob_with_its_default(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    rows = dict(re.findall(rf"^\| `rollout\.{name}\.(\w+)` \|(.*?)\|", page, re.M))
    config = getattr(RolloutConfig(), name)
    defaults = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    defaults = {name: value for name, value in defaults.items() if not dataclasses.is_dataclass(value)}
    assert set(rows) == set(defaults)
    for knob, default in defaults.items():
        text = f"[{', '.join(default)}]" if isinstance(default, list) else str(default)
        assert rows[knob].strip("` ") == text, knob


def test_the_agent_of_the_page_is_trained_on_both_answers(say: Any, tokenizer: Any) -> None:
    (command,) = commands("agent.md")
    engine = say(lambda prompt, _: "#### 7" if "Check your answer" in prompt else "#### 8")
    workflow = build_workflow(cli.load(command).rollout, "rlvr", None, GCONFIG, tokenizer)  # type: ignore[arg-type]
    batch = engine.rollout_batch([DATA], workflow)
    assert batch["rewards"].tolist() == [1.0]
    assert tokenizer.decode(batch["input_ids"][batch["loss_mask"]], skip_special_tokens=True) == "#### 8#### 7"


def test_the_tool_of_the_page_is_called(say: Any, tokenizer: Any) -> None:
    call = f"<tool_call>{json.dumps({'name': 'reverse', 'arguments': {'text': '7 ####'}})}</tool_call>"
    engine = say(lambda prompt, _: "#### 7" if prompt.endswith("#### 7<|assistant|>") else call)
    seen: list[dict[str, Any]] = []

    def reward_fn(prompt: str, completions: str, *_: Any, **data: Any) -> float:
        seen.append(data)
        return float(completions == data["answer"])

    (command,) = [command for command in commands("tool_use.md") if "my_tools" in " ".join(command)]
    batch = engine.rollout_batch(
        [DATA], build_workflow(cli.load(command).rollout, "rlvr", reward_fn, GCONFIG, tokenizer)
    )
    assert batch["rewards"].tolist() == [1.0]
    assert call in seen[0]["transcript"]
