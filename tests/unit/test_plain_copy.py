"""The bandwidth bound of a sync, `benchmarks/acceptance/plain_copy.py`, and what `reshard.py` makes of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import reshard
import timing
from acceptance import plain_copy

MIB = 2**20


@pytest.mark.cpu_options("transports of the host")
@pytest.mark.parametrize(
    ("transport", "sizes"),
    [
        pytest.param("gloo", [3 * 64 * MIB + 5, MIB], marks=pytest.mark.long),
        pytest.param("gloo", [128 * MIB], marks=pytest.mark.long),
        ("gloo", [3 * 64 * MIB + 5]),
        ("shm", [3 * 64 * MIB + 5, MIB]),
    ],
)
def test_ranks_hold_what_was_sent_to_them_in_more_messages_than_slots(transport: str, sizes: list[int]) -> None:
    """A rank that holds other bytes ends with an error, which `copy_seconds` raises."""
    assert 0 < plain_copy.copy_seconds(transport, sizes, rounds=1) < plain_copy.DEADLINE_S


@pytest.mark.cpu_options("transports of the host")
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)plain copy by telex failed: .*transport 'telex' is not"):
        plain_copy.copy_seconds("telex", [1], rounds=1)


def test_messages_are_as_large_as_a_bucket() -> None:
    assert plain_copy.lengths(10, 4) == [4, 4, 2]
    assert plain_copy.lengths(8, 4) == [4, 4]
    assert plain_copy.lengths(0, 4) == []


def test_a_sync_is_compared_with_the_copy_of_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = tmp_path / "figures"
    monkeypatch.setattr(timing, "_figures", figures)
    args = argparse.Namespace(device="cpu", transport="shm", tp=2, dtype="float32")
    results = {
        "seconds": {"exact off": 0.5, "exact always": 0.55}, "received": {"exact": [4 * 10**8, 4 * 10**8]},
        "verified": 7, "parameters": 2 * 10**8, "bound": 0.4,
    }  # fmt: skip
    reshard.show(args, results, {"exact": [0]})
    found = {figure["figure"]: figure["value"] for figure in map(json.loads, figures.read_text().splitlines())}
    assert found["time over bound"] == pytest.approx(1.25)
    assert found["digests' share of the bound"] == pytest.approx(0.125)
    assert found["plain copy"] == pytest.approx(2.0)
