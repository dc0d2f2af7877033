"""The full path of one attempt, on rank 0: full tensors to every rank of every server, by broadcast or by files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Box
from megarl.reshard.sync.attempt import TransferTotals
from megarl.reshard.sync.coordinator import Coordinator, Retry
from megarl.reshard.sync.server_link import ServerLink
from megarl.reshard.transfer.digests import check_digests, check_names
from megarl.reshard.transfer.full_tensor_transfer import DeliveryError, FullTensorSender
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports import disk
from megarl.reshard.transfer.transports.gloo import GlooTransport

RankBoxes = list[list[tuple[Box, torch.dtype]]]  # boxes of each rank of a server, in the rank's own order


def run(
    coordinator: Coordinator,
    named_weights: Iterator[tuple[str, Tensor]],
    folder: Path | None,
    host: str,
    *,
    verify: str,
) -> TransferTotals:
    """Sends every tensor, and proves that the servers hold it. With a `folder` files there carry them.

    Raises:
        WeightSyncError, Retry: a server failed.
        VerificationError: a name that only one side has.
    """
    config = coordinator.config
    held: dict[ServerLink, RankBoxes] = {}
    with coordinator.timed("connect", config.connect_deadline_s):
        deadline = Deadline(config.connect_deadline_s)
        coordinator.for_each(lambda link: held.update({link: link.held_boxes(deadline)}))
        if folder is None:
            coordinator.for_each(lambda link: link.join_broadcast_group(host, deadline))
    with coordinator.timed("transfer", config.transfer_deadline_s):
        sender = _sender(coordinator, held, folder, Deadline(config.transfer_deadline_s), verify)
        try:
            for name, tensor in named_weights:
                sender.add(name, tensor)
            check_names(sender.names, sender.dtypes)
            sender.finish()
        except DeliveryError as error:
            for link in [link for link in coordinator.active if link.address == error.server]:
                coordinator.drop(link, error)
            raise Retry from error
    reports: dict[ServerLink, list[dict[str, Any]]] = {}
    with coordinator.timed("apply", config.transfer_deadline_s):
        coordinator.for_each(lambda link: reports.update({link: link.finish(sender.deadline)}))
    coordinator.end()
    verified: dict[str, int] = {}

    def check(link: ServerLink) -> None:
        verified[link.address] = 0
        for rank, (boxes, report) in enumerate(zip(held[link], reports[link], strict=True)):
            held_digests = {box: value for (box, _), value in zip(boxes, report["held"], strict=True)}
            verified[link.address] += check_digests(sender.digests, held_digests, f"rank {rank}")

    with coordinator.timed("verify", config.transfer_deadline_s):
        if verify != "off":
            coordinator.for_each(check)
    if folder is not None:
        disk.remove(folder)
    received = tuple(rank["bytes"] for link in coordinator.active for rank in reports[link])
    return TransferTotals(sender.nbytes, sender.nbytes, 0, verified, received)


def _sender(
    coordinator: Coordinator, held: dict[ServerLink, RankBoxes], folder: Path | None, deadline: Deadline, verify: str
) -> FullTensorSender:
    """A sender to all active servers. Raises WeightSyncError if they store a tensor in different dtypes."""
    boxes: dict[str, set[Box]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for link in coordinator.active:
        for box, dtype in (item for rank in held[link] for item in rank):
            boxes.setdefault(box.name, set()).add(box)
            if dtypes.setdefault(box.name, dtype) != dtype:
                words = f"it holds {box.name} as {dtype}, another as {dtypes[box.name]}; use reshard.path=exact"
                raise coordinator.sync_error(link, ValueError(words))
    return FullTensorSender(
        targets=list(coordinator.active),
        bucket_bytes=coordinator.config.bucket_bytes or GlooTransport.bucket_bytes,
        deadline=deadline,
        dtypes=dtypes,
        boxes=boxes if verify != "off" else {},
        folder=folder,
    )
