"""Checks the words: docstrings and comments that a stranger reads once.

`python tests/unit/test_prose.py PATH ...` lists what to reword.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WORDS = 28  # of a sentence; about 20 is what to aim at
QUESTION = re.compile(r"(What|Which|Who|Whom|Whose|Whether|How|Where|When|Why|The same|Those|That which)\b")
RIDDLES = re.compile(
    r"\b(those of|the same for|as it is there|is such\b|are such\b|what it is made of|of what|to whom|whoever|whatever"
    r"|is none of|whereupon|upon which|in which case|be it)\b",
    re.I,
)
CODE = re.compile(r"`[^`]*`")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def sentences(text: str) -> Iterator[str]:
    """Sentences of a docstring, without code, tables and pictures of text."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.split("\n") if not re.match(r"\s*([|+`>#-]|\S+(  +|\t)\S)", line)]
        if paragraph.startswith("    ") and not any(line.strip().endswith(".") for line in lines):
            continue  # a drawing
        entries = re.sub(r"\n\s*[\w*, `]+: ", "\n\0", "\n".join(lines))  # of Args and Raises
        for part in entries.split("\0"):
            flat = " ".join(CODE.sub("x", part).split())
            yield from (s for s in re.split(r"(?<=[.!?])\s+", flat) if s)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield getattr(node, "lineno", 1), doc


def page_problems(path: Path) -> list[str]:
    """Sentences of too many words, and the dialect's turns of phrase, in a page without its code and tables."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.M | re.S)
    text = re.sub(r"^\s*([|#!<]|\[).*$", "", text, flags=re.M)
    found = []
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M):
        flat = " ".join(re.sub(r"\]\([^)]*\)", "]", CODE.sub("x", block)).split())
        for sentence in re.split(r"(?<=[.!?:;])\s+", flat):
            if len(sentence.split()) > MAX_WORDS:
                found.append(f"{path}: {len(sentence.split())} words in a sentence: {sentence[:70]!r}")
            if riddle := RIDDLES.search(sentence):
                found.append(f"{path}: say {riddle.group(0)!r} with a noun: {sentence[:60]!r}")
    return found


def problems(path: Path) -> list[str]:
    """Docstrings that begin with a question word, sentences of too many words, and the dialect's turns of phrase."""
    source, found = path.read_text(), []
    for line, doc in docstrings(ast.parse(source)):
        if QUESTION.match(doc):
            found.append(f"{path}:{line}: begin with a verb or the field's noun: {doc[:60]!r}")
        for sentence in sentences(doc):
            if len(sentence.split()) > MAX_WORDS:
                found.append(f"{path}:{line}: {len(sentence.split())} words in a sentence: {sentence[:70]!r}")
        if riddle := RIDDLES.search(CODE.sub("x", doc)):
            found.append(f"{path}:{line}: say {riddle.group(0)!r} with a noun: {doc[:60]!r}")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (riddle := RIDDLES.search(CODE.sub("x", token.string))):
            found.append(f"{path}:{token.start[0]}: say {riddle.group(0)!r} with a noun: {token.string[:70]!r}")
    return found


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files("megarl"), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_are_read_once(path: Path):
    assert problems(path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_read_once(path: Path):
    assert page_problems(path) == []


def test_the_check_of_pages_finds_long_sentences_and_riddles(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n- " + "word " * 29 + "end.\n\nA row, and those of\nothers.\n\n```\n" + "code " * 40 + "\n```\n"
    )
    assert [message.partition(": ")[2].partition(" in ")[0] for message in page_problems(page)] == [
        "30 words",
        "say 'those of' with a noun: 'A row, and those of others.'",
    ]


def test_the_check_finds_what_a_stranger_would_read_twice(tmp_path: Path):
    long = "Reads " + "one more word and " * 10 + "ends."
    bad = {'"""What a rank holds."""': "begin with", f'"""{long}"""': "words", "x = 1  # those of a row": "those of"}
    for source, message in bad.items():
        path = tmp_path / "check.py"
        path.write_text(source)
        assert message in problems(path)[0]


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]] or [ROOT / "megarl"]
    files = [file for path in given for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    rows = [row for file in files for row in problems(file)]
    every = [s for file in files for _, doc in docstrings(ast.parse(file.read_text())) for s in sentences(doc)]
    print("\n".join(rows))
    mean = sum(len(s.split()) for s in every) / max(len(every), 1)
    print(f"{len(rows)} problems; {len(every)} sentences of docstrings, {mean:.1f} words on average")
