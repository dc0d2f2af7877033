"""The emulation of NCCL lets through what NCCL does, and names the ranks and operations that break its rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.launcher.local import run_ranks
from tests.nccl_semantics.rules_worker import LARGE, SHORT_S, SMALL


def run(case: str, ranks: int, work: Path) -> tuple[int, str]:
    """The exit code, and what the ranks report."""
    code = run_ranks("tests.nccl_semantics.rules_worker", [str(work), case], ranks, work)
    files = [*sorted(work.glob("*.refused")), *sorted(work.glob("*.stuck"))]
    return code, "\n".join(file.read_text() for file in files)


def test_ranks_that_keep_the_rules_pass(tmp_path: Path) -> None:
    assert run("kept", 2, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("case", "reports"),
    [
        ("swapped_collectives", ["group default_pg (ranks 0, 1): allreduce 600 x torch.float32", "in its place"]),
        (
            "swapped_messages",
            [f"receives {LARGE} x torch.float32 from rank 0 of the group, which sends {SMALL} x torch.float32"],
        ),
        ("same_device", ["duplicate GPU in group default_pg (ranks 0, 1)"]),
    ],
    ids=["collectives", "messages", "devices"],
)
def test_operations_that_do_not_match_are_refused(case: str, reports: list[str], tmp_path: Path) -> None:
    code, text = run(case, 2, tmp_path)
    assert code != 0
    for report in reports:
        assert report in text


@pytest.mark.parametrize(
    ("case", "ranks", "reports"),
    [
        (
            "message_before_collective", 2,
            [
                "rank 0 is stuck: operation 2 of group default_pg (ranks 0, 1): allreduce",
                "rank 1 is stuck: operation 2 of group default_pg (ranks 0, 1): batch of recv",
            ],
        ),
        (
            "crossing", 2,
            [f"rank {rank} is stuck: operation 1 of pair of group default_pg (ranks 0, 1): send" for rank in (0, 1)],
        ),
        pytest.param(
            "part_of_group", 3,
            [f"rank {r} is stuck: building the communicator of group default_pg (ranks 0, 1, 2)" for r in (0, 1)],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "slow", 2, ["rank 0 is stuck: operation 2 of group undefined (ranks 0, 1): allreduce 1 x"],
            marks=pytest.mark.long,
        ),
    ],
    ids=["message before collective", "crossing", "part of the group", "slow"],
)  # fmt: skip
def test_ranks_that_wait_for_ever_are_named_with_their_operation(
    case: str, ranks: int, reports: list[str], tmp_path: Path
) -> None:
    code, text = run(case, ranks, tmp_path)
    assert code != 0
    for report in reports:
        line = next(line for line in text.splitlines() if line.startswith(report))
        assert float(line.split()[-2]) >= SHORT_S - 0.1
    assert f"in {case}" in text  # the stack
