"""Runs docs/data_formats.md: every row gives the output shown, the Python runs, and all types are covered."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from megarl.axolotl.read import read_axolotl
from megarl.data.config import DatasetConfig
from megarl.data.examples import get_preference_dataset
from megarl.data.preference import JUDGED, PAIRS
from megarl.data.templates import CHATML
from megarl.data.tokenizer import train_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "data_formats.md").read_text(encoding="utf-8")


def chatml_like() -> PreTrainedTokenizerBase:
    """Returns the ChatML tokenizer of the page."""
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}, replace_extra_special_tokens=False
    )
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML.jinja()
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerBase:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return chatml_like()


def becomes(type_: str, options: dict[str, Any], row: dict[str, Any], paired: bool, tokenizer: Any) -> str:
    """Writes the outcome of a row as the page shows it: the texts of its tokens."""
    Path("row.jsonl").write_text(json.dumps(row) + "\n")
    config = DatasetConfig(path="row.jsonl", type=type_, options=options)
    (example,) = get_preference_dataset(config, tokenizer, paired)
    lines = [f"{k.removesuffix('_ids'):<11}{tokenizer.decode(v)!r}" for k, v in example.items() if k.endswith("_ids")]
    return "\n".join([*lines, *([] if paired else [f"{'label':<11}{example['kto_label']}"])])


def sections(title: str) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the types in each heading below a title, and the code under the heading by language."""
    chapter = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    parts = []
    for part in chapter.split("\n### ")[1:]:
        blocks = dict(re.findall(r"```(\w+)\n(.*?)\n```", part, re.DOTALL))
        parts.append((re.findall(r"`([^`]+)`", part.split("\n")[0]), blocks))
    return parts


@pytest.mark.parametrize(("title", "table"), [("Pairs", PAIRS), ("Judged completions", JUDGED)])
def test_every_type_is_shown_with_a_row_and_its_output(title: str, table: dict[str, Any], tokenizer: Any) -> None:
    documented = sections(title)
    assert sorted(name for names, _ in documented for name in names) == sorted(table)
    for names, blocks in documented:
        options = yaml.safe_load(blocks.get("yaml", "{}"))
        for i, name in enumerate(names):
            outcome = becomes(name, options, json.loads(blocks["json"]), title == "Pairs", tokenizer)
            assert i > 0 or outcome == blocks["text"], name


def test_the_python_runs(tokenizer: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)\n```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {"tokenizer": tokenizer}
    for block in blocks:
        exec(block, names)  # the code of the page


def test_the_axolotl_example_prints_the_table_shown(tokenizer: Any) -> None:
    text, table = re.findall(r"```yaml\n(base_model.*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)[0]
    Path("dpo.yaml").write_text(text)
    assert read_axolotl("dpo.yaml").table == table
