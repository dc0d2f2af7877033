"""The weight sync's nccl transport under NCCL's rules: slow servers are waited for, dead ones are named and left out.

See `process_group_nccl` for what the emulation covers.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.reshard.transfer.store import open_store
from tests import warm
from tests.nccl_semantics import sync_worker
from tests.nccl_semantics.sync_worker import HOPELESS_S, SYNCS
from tests.unit.reshard.test_shard_transfer import HOST

RANKS = ("trainer", "server 0", "server 1")
END_S = 300.0  # for a hang alone


@dataclass
class Run:
    """Exit codes (None: it hung), outcomes and logs of the processes."""

    codes: dict[str, int | None]
    outcomes: dict[str, Any]
    logs: str


def run(how: str, noticed: bool, folder: Path) -> Run:
    store = open_store(HOST, 300)
    processes = {
        name: warm.CONTEXT.Process(
            target=sync_worker.run, args=(dict(os.environ), str(folder), name, store.port, how, noticed)
        )
        for name in RANKS
    }
    for process in processes.values():
        process.start()
    codes = {}
    for name in reversed(RANKS):  # a trainer that hangs keeps server 1 waiting, too
        processes[name].join(END_S)
        codes[name] = processes[name].exitcode
        processes[name].kill()
        processes[name].join()
    files = {name: folder / f"{name}.json" for name in RANKS}
    outcomes = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    return Run(codes, outcomes, "\n".join(file.read_text() for file in folder.glob("*.log")))


def sent(server: int) -> list[list[Any]]:
    return [[sync, server, "sent"] for sync in range(SYNCS)]


def arrived(server: int) -> list[list[Any]]:
    return [[sync, server, "arrived"] for sync in range(SYNCS)]


@pytest.mark.parametrize("how", ["healthy", "slow"])
def test_weights_arrive_even_if_a_server_takes_longer_than_the_time_to_connect(how: str, tmp_path: Path) -> None:
    result = run(how, False, tmp_path)
    assert result.codes == dict.fromkeys(RANKS, 0), result.logs
    assert sorted(result.outcomes["trainer"]) == sorted([*sent(0), *sent(1)])
    assert result.outcomes["server 0"] == arrived(0)
    assert result.outcomes["server 1"] == arrived(1)


@pytest.mark.parametrize(
    ("how", "noticed", "reason"),
    [
        ("dead_early", False, rf"waited for rank 0 of server 0: deadline of {HOPELESS_S:g} s passed"),
        ("dead", False, rf"waited for rank 0 of server 0: deadline of {HOPELESS_S:g} s passed"),
        ("dead", True, r"rank 0 of server 0 left \(operation \d+ of pair \(ranks 0, 1\): send to 1: "),
    ],
    ids=["before its first message", "unnoticed", "noticed"],
)
def test_a_server_that_dies_is_named_and_the_trainer_goes_on_with_the_other(
    how: str, noticed: bool, reason: str, tmp_path: Path
) -> None:
    result = run(how, noticed, tmp_path)
    assert result.codes == dict.fromkeys(RANKS, 0), result.logs
    failures = [row for row in result.outcomes["trainer"] if row[2] != "sent"]
    assert [row[:2] for row in failures] == [[int(how == "dead"), 0]]
    assert re.match(rf"rank 0 of server 0: t\d.*{reason}", failures[0][2]), failures
    assert [row for row in result.outcomes["trainer"] if row[1] == 1] == sent(1)
    assert result.outcomes["server 1"] == arrived(1)
