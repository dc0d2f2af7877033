"""Files that are read while they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.board import growing_file
from megarl.observe.board.growing_file import GrowingFile, last_line, line_at, parse


def steps(file: GrowingFile) -> list[int]:
    return [values["step"] for _, _, values in file.new_lines()]


def test_a_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = GrowingFile(path)
    assert steps(file) == []  # it does not exist yet
    path.write_text('{"step": 1}\n{"st')
    assert steps(file) == [1]
    with path.open("a") as more:
        more.write('ep": 2}')
    assert steps(file) == []
    with path.open("a") as more:
        more.write('\n{"step": 3}\n')
    assert steps(file) == [2, 3]
    assert steps(file) == []
    assert (file.damaged, file.resets) == (0, 0)


def test_a_replaced_or_shortened_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    file = GrowingFile(path)
    assert steps(file) == [1, 2]
    new = tmp_path / "new"
    new.write_text('{"step": 1}\n{"step": 9}\n{"step": 10}\n')
    new.replace(path)
    assert steps(file) == [1, 9, 10]
    assert file.resets == 1
    path.write_text('{"step": 4}\n')
    assert steps(file) == [4]
    assert file.resets == 2


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(b'{"step": 1}\n{"half": \n[1]\n\n' + deep + b'\n{"step": 2, "t": "\xff\xfe"}\n')
    file = GrowingFile(path)
    lines = [values for _, _, values in file.new_lines()]
    assert lines == [{"step": 1}, {"step": 2, "t": "\ufffd\ufffd"}]
    assert file.damaged == 3


def test_places_lead_back_to_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": n, "text": "é" * n}, ensure_ascii=False) + "\n" for n in range(50)))
    for offset, length, values in GrowingFile(path).new_lines():
        assert line_at(path, offset, length) == values
    assert last_line(path) == {"step": 49, "text": "é" * 49}


@pytest.mark.parametrize("before", [0, 1, 3, 200])
def test_the_last_line_is_found_however_long_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(growing_file, "TAIL", 8)
    monkeypatch.setattr(growing_file, "CHUNK", 64)
    path = tmp_path / "m.jsonl"
    path.write_text("x" * before + '\n{"step": 1, "text": "' + "x" * 20 + '"}\ndamaged\n{"step": 2')
    assert last_line(path) == {"step": 1, "text": "x" * 20}
    path.write_text('{"step": 1}\n' + "damaged\n" * 20)
    assert last_line(path) is None  # further from the end than CHUNK


def test_of_a_long_file_the_last_line_takes_one_short_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_file, "TAIL", 64)
    parsed: list[bytes] = []

    def recorded(line: bytes) -> dict[str, Any] | None:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(growing_file, "parse", recorded)
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(1000)) + "damaged\n" * 4)
    assert last_line(path) == {"step": 999}
    assert parsed == [b"damaged"] * 4 + [b'{"step": 999}']


def test_lines_longer_than_a_chunk_are_read_and_endless_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing_file, "CHUNK", 64)
    monkeypatch.setattr(growing_file, "MAX_LINE", 1024)
    path = tmp_path / "m.jsonl"
    lines = [{"step": 1, "text": "x" * 500}, {"step": 2, "text": "x" * 5000}, {"step": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = GrowingFile(path)
    assert steps(file) == [1, 3]
    assert file.damaged >= 1
    assert last_line(path) == {"step": 3}
