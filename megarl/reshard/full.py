"""The full path of one attempt, on rank 0: whole tensors to every rank of every server, by broadcast or by files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.coordinator import Coordinator, Retry
from megarl.reshard.exact import Moved
from megarl.reshard.layout import Box
from megarl.reshard.link import ServerLink
from megarl.reshard.reference import DeliveryError, FullSender
from megarl.reshard.store import Deadline
from megarl.reshard.transports import disk
from megarl.reshard.verify import check_digests, check_names

Held = list[list[tuple[Box, torch.dtype]]]  # what each rank of a server holds, in its own order


def run(
    chief: Coordinator, named_weights: Iterator[tuple[str, Tensor]], folder: Path | None, host: str, *, verify: str
) -> Moved:
    """Sends every tensor, and proves that the servers hold it. With a `folder` files there carry them.

    Raises:
        WeightSyncError, Retry: a server failed. VerificationError: names that only one side has.
    """
    config = chief.config
    held: dict[ServerLink, Held] = {}
    with chief.timed("connect", config.connect_deadline_s):
        deadline = Deadline(config.connect_deadline_s)
        chief.each(lambda link: held.update({link: link.held(deadline)}))
        if folder is None:
            chief.each(lambda link: link.join_broadcasts(host, deadline))
    with chief.timed("transfer", config.transfer_deadline_s):
        sender = _sender(chief, held, folder, Deadline(config.transfer_deadline_s), verify)
        try:
            for name, tensor in named_weights:
                sender.add(name, tensor)
            check_names(sender.names, sender.dtypes)
            sender.finish()
        except DeliveryError as error:
            for link in [link for link in chief.active if link.address == error.server]:
                chief.drop(link, error)
            raise Retry from error
    results: dict[ServerLink, list[dict[str, Any]]] = {}
    with chief.timed("apply", config.transfer_deadline_s):
        chief.each(lambda link: results.update({link: link.finish(sender.deadline)}))
    chief.end()
    verified = 0

    def check(link: ServerLink) -> None:
        nonlocal verified
        for rank, (boxes, result) in enumerate(zip(held[link], results[link], strict=True)):
            found = {box: value for (box, _), value in zip(boxes, result["held"], strict=True)}
            verified += check_digests(sender.digests, found, f"rank {rank}")

    with chief.timed("verify", config.transfer_deadline_s):
        if verify != "off":
            chief.each(check)
    if folder is not None:
        disk.remove(folder)
    received = tuple(rank["bytes"] for link in chief.active for rank in results[link])
    return Moved(sender.bytes, sender.bytes, verified, received)


def _sender(
    chief: Coordinator, held: dict[ServerLink, Held], folder: Path | None, deadline: Deadline, verify: str
) -> FullSender:
    boxes: dict[str, set[Box]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for link in chief.active:
        for box, dtype in (item for rank in held[link] for item in rank):
            boxes.setdefault(box.name, set()).add(box)
            if dtypes.setdefault(box.name, dtype) != dtype:
                words = f"it holds {box.name} as {dtype}, another as {dtypes[box.name]}; use reshard.path=exact"
                raise chief.failure(link, ValueError(words))
    return FullSender(
        receivers=list(chief.active),
        bucket_bytes=chief.config.bucket_bytes,
        deadline=deadline,
        dtypes=dtypes,
        boxes=boxes if verify != "off" else {},
        folder=folder,
    )
