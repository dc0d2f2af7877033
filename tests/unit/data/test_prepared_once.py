"""Ranks of a machine that start together on data which nobody has prepared yet: one prepares it, the others wait."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Value

from megarl.data import prepare
from megarl.data.prepare import cached_map
from megarl.knobs import UserError

ROWS = Dataset.from_dict({"number": list(range(12))})
FEATURES = Features({"double": Value("int64")})


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.tempfile, "tempdir", str(tmp_path))


def test_one_of_several_prepares_the_rows() -> None:
    rows, together = [], threading.Barrier(3)

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        time.sleep(0.01)
        rows.append(index)
        return {"double": 2 * row["number"]}

    def prepared(_: int) -> list[int]:
        together.wait(300)
        return list(cached_map(ROWS, convert, FEATURES, ["doubled"], "doubling")["double"])

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(prepared, range(3)))
    assert results == [[2 * number for number in range(12)]] * 3
    assert sorted(rows) == list(range(12))


def test_who_waits_for_longer_than_a_day_says_for_whom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(row: dict[str, Any], _: int) -> dict[str, Any]:
        monkeypatch.setattr(prepare, "PREPARING_S", 0.05)
        with pytest.raises(UserError, match=rf"has prepared the same data for .* hours; .* remove {tmp_path}/megarl-"):
            cached_map(ROWS, convert, FEATURES, ["held"], "holding")
        return {"double": 2 * row["number"]}

    held = ROWS.select(range(1))
    monkeypatch.setattr(prepare, "content_hash", lambda rows: "the same")
    assert list(cached_map(held, convert, FEATURES, ["held"], "holding")["double"]) == [0]
    assert list(cached_map(held, convert, FEATURES, ["held"], "holding")["double"]) == [0]


def test_a_lock_that_cannot_be_made_is_named_with_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prepare.tempfile, "tempdir", str(tmp_path / "nowhere"))
    (tmp_path / "nowhere").write_text("no folder")
    with pytest.raises(UserError, match=rf"the lock {tmp_path}/nowhere/megarl-.* cannot be made .*; set TMPDIR to a"):
        cached_map(ROWS, lambda row, _: {"double": row["number"]}, FEATURES, ["unlocked"], "holding")
