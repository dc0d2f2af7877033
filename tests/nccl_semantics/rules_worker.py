"""Worker of every rank: breaks or keeps one of NCCL's rules. Arguments: the work folder and the case."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.nccl_semantics import communicator, nccl_over_gloo
from tests.nccl_semantics.communicator import NcclError, Watchdog

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LIMIT_S = 300.0  # for a hang alone
SHORT_S = 6.0  # where ranks are meant to hang, from when they do
SMALL, LARGE = 600, 700  # elements


def batch(*operations: tuple[str, torch.Tensor, int]) -> None:
    methods = {"send": dist.isend, "recv": dist.irecv}
    for work in dist.batch_isend_irecv([dist.P2POp(methods[m], tensor, peer) for m, tensor, peer in operations]):
        work.wait()


def kept() -> None:
    """Batches that cross, single messages in order, messages of two directions without a wait, and a collective."""
    other, theirs, small = 1 - RANK, torch.empty(LARGE), torch.full((SMALL,), float(RANK))
    batch(("send", torch.full((LARGE,), float(RANK)), other), ("recv", theirs, other))
    assert theirs.eq(other).all()
    (dist.send if RANK == 0 else dist.recv)(small, other)
    assert small.eq(0).all()
    works = [dist.isend(torch.ones(SMALL), other) if RANK == 0 else dist.irecv(small, other) for _ in range(3)]
    dist.all_reduce(theirs)
    assert theirs.eq(1).all()
    for work in works:
        work.wait()
    assert small.eq(RANK).all()


def swapped_collectives() -> None:
    def reduce() -> None:
        dist.all_reduce(torch.ones(SMALL))

    def gather() -> None:
        dist.all_gather_into_tensor(torch.empty(WORLD * SMALL), torch.ones(SMALL))

    for call in (reduce, gather) if RANK == 0 else (gather, reduce):
        call()


def swapped_messages() -> None:
    for size in (SMALL, LARGE) if RANK == 0 else (LARGE, SMALL):
        batch(("send" if RANK == 0 else "recv", torch.ones(size), 1 - RANK))


def message_before_collective() -> None:
    """The group's communicator is there; rank 0 has a collective first, rank 1 a message."""
    dist.barrier()
    works = []
    for turn in (0, 1) if RANK == 0 else (1, 0):
        if turn == 0:
            works.append(dist.all_reduce(torch.ones(SMALL), async_op=True))
        else:
            works += dist.batch_isend_irecv(
                [dist.P2POp(dist.isend if RANK == 0 else dist.irecv, torch.ones(SMALL), 1 - RANK)]
            )
    for work in works:
        work.wait()


def crossing() -> None:
    """Both ranks send to each other before they receive, one by one."""
    dist.send(torch.ones(SMALL), 1 - RANK)
    dist.recv(torch.empty(SMALL), 1 - RANK)


def part_of_group() -> None:
    """The group's first batch is of two ranks, and the third one is busy."""
    if RANK == 2:
        while len(list(Path(sys.argv[1]).glob("*.stuck"))) < 2:
            time.sleep(communicator.POLL_S)
    batch(("send" if RANK == 0 else "recv", torch.ones(SMALL), 1 - RANK))


def slow() -> None:
    """A rank is late for a collective by more than the group's timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT_S))
    dist.barrier(group)  # builds the communicator, for which the timeout does not hold
    if RANK == 1:
        time.sleep(2 * SHORT_S)
    dist.all_reduce(torch.ones(1), group=group)


def same_device() -> None:
    dist.all_reduce(torch.ones(1))


# Where ranks hang, and how many of them hang there.
HANGING = {
    message_before_collective: ("operation 2 of group", 2),
    crossing: ("operation 1 of pair", 2),
    part_of_group: ("building the communicator", 2),
}
CASES = (kept, swapped_collectives, swapped_messages, same_device, slow, *HANGING)


def shorten(work: Path, watchdog: Watchdog, place: str, ranks: int) -> None:
    """Leaves SHORT_S to what this rank is in, once it and all others that hang are where they do."""
    while not any(place in pending.what for pending in list(watchdog._pending.values())):
        time.sleep(communicator.POLL_S)
    (work / f"rank_{RANK}.there").touch()
    while len(list(work.glob("*.there"))) < ranks:
        time.sleep(communicator.POLL_S)
    for pending in list(watchdog._pending.values()):
        pending.limit_s = SHORT_S


def main(work: Path, name: str) -> None:
    case = next(case for case in CASES if case.__name__ == name)
    emulation = nccl_over_gloo.install(work, LIMIT_S, device=0 if case is same_device else RANK)
    if case in HANGING:
        place, ranks = HANGING[case]
        threading.Thread(target=shorten, args=(work, emulation.watchdog, place, ranks), daemon=True).start()
        emulation.watchdog.world_size, communicator.EXPLAIN_S = ranks, LIMIT_S  # all of them report
    store = dist.FileStore(os.environ["MEGARL_RENDEZVOUS"], WORLD)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=WORLD)
    try:
        case()
    except NcclError as error:
        (work / f"rank_{RANK}.refused").write_text(str(error))
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
