"""Bandwidth bound of a weight sync: the same bytes between the same ranks by the same transport, and nothing else.

Trainer rank i sends server rank i its bytes in one stream of messages, each as large as a bucket of a sync. Nothing is
packed, unpacked, planned or hashed. Where a transport hands out the sender's memory, the receiver copies it once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch.distributed import PrefixStore, Store

from megarl.reshard.transfer.store import Deadline, join_store, open_store, read, write
from megarl.reshard.transfer.transports import transport_named
from megarl.reshard.transfer.transports.base import SLOTS, Transport, own_device

HOST, DEADLINE_S = "127.0.0.1", 120.0


def copy_seconds(transport: str, sizes: Sequence[int], gpus: Sequence[int] = (), rounds: int = 3) -> float:
    """Median seconds until rank i of `sizes` has sent its bytes and its peer holds them, for all ranks at once.

    `gpus` has the GPU of each sender, then of each receiver; without it all are on the host.

    Raises:
        RuntimeError: a rank ended early, or a receiver does not hold what was sent.
    """
    store = open_store(HOST, DEADLINE_S)
    spec = {"port": store.port, "transport": transport, "sizes": list(sizes), "gpus": list(gpus), "rounds": rounds}
    command = [sys.executable, __file__, json.dumps(spec), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2 * len(sizes))
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=4 * DEADLINE_S)
            if rank.returncode:
                raise RuntimeError(f"a rank of the plain copy by {transport} failed: {errors.strip()[-500:]}")
        times = [read(store, f"seconds/{rank}", Deadline(DEADLINE_S)) for rank in range(len(ranks))]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return statistics.median(max(of_round) for of_round in zip(*times, strict=True))


def meet(store: Store, name: str, rank: int, ranks: int) -> None:
    """Returns when all ranks have come here."""
    write(store, f"{name}/{rank}", rank)
    for other in range(ranks):
        read(store, f"{name}/{other}", Deadline(DEADLINE_S))


def lengths(nbytes: int, most: int) -> list[int]:
    """Bytes of each message."""
    return [min(most, nbytes - first) for first in range(0, nbytes, most)]


def send(group: Transport, nbytes: int, most: int, peer: int, tags: itertools.count[int]) -> None:
    """Sends the bytes; a staging slot is used again when its message is over."""
    pending = []
    for number, length in enumerate(lengths(nbytes, most)):
        if number >= SLOTS:
            pending[number - SLOTS].wait(Deadline(DEADLINE_S))
        pending.append(group.send(number % SLOTS, length, peer, next(tags)))
    for message in pending[-SLOTS:]:
        message.wait(Deadline(DEADLINE_S))


def receive(
    group: Transport, held: torch.Tensor, nbytes: int, most: int, peer: int, tags: itertools.count[int]
) -> torch.Tensor:
    """Receives the bytes, into `held` where the transport shows the sender's memory. Returns the last message's."""
    sizes, message = lengths(nbytes, most), held
    pending = [group.receive(number, sizes[number], peer, next(tags)) for number in range(min(SLOTS, len(sizes)))]
    for number, length in enumerate(sizes):
        message = pending[number].wait(Deadline(DEADLINE_S))
        if group.in_place:
            message = held[number * most : number * most + length].copy_(message)
        pending[number].release()
        if number + SLOTS < len(sizes):
            pending.append(group.receive(number % SLOTS, sizes[number + SLOTS], peer, next(tags)))
    return message


def run(spec: dict[str, object], rank: int) -> None:
    """Runs one rank: a round that warms up, then the rounds that count."""
    sizes, gpus, rounds = list(spec["sizes"]), list(spec["gpus"]), int(str(spec["rounds"]))  # type: ignore[call-overload]
    torch.set_num_threads(1)
    if gpus:
        torch.cuda.set_device(gpus[rank])
    kind, pairs = transport_named(str(spec["transport"])), len(sizes)
    store = join_store(HOST, int(str(spec["port"])), DEADLINE_S)
    staging = kind.make_staging(kind.bucket_bytes)
    group = kind(PrefixStore("copy", store), HOST, rank, 2 * pairs, DEADLINE_S, staging)
    nbytes, most, sends, tags = sizes[rank % pairs], kind.bucket_bytes, rank < pairs, itertools.count()
    for slot in staging.slots:
        slot.fill_(rank + 1 if sends else 0)
    room = nbytes if kind.in_place and not sends else 0
    held = torch.zeros(room, dtype=torch.uint8, device=own_device() if gpus else "cpu")
    last, seconds = held, []
    for number in range(rounds + 1):
        meet(store, f"round/{number}", rank, 2 * pairs)
        began = time.perf_counter()
        if sends:
            send(group, nbytes, most, rank + pairs, tags)
        else:
            last = receive(group, held, nbytes, most, rank - pairs, tags)
        if gpus:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if last.numel() and (wrong := int(last[-1])) != rank - pairs + 1:
        raise SystemExit(f"rank {rank} holds {wrong}, and was sent {rank - pairs + 1}")
    write(store, f"seconds/{rank}", seconds[1:])
    meet(store, "end", rank, 2 * pairs)
    group.abort()
    staging.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=json.loads)
    parser.add_argument("--rank", type=int, required=True)
    given = parser.parse_args()
    run(given.spec, given.rank)
