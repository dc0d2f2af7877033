"""The full path of one attempt, on rank 0: whole tensors to every rank of every server, by broadcast or by files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.plan.holdings import Box
from megarl.reshard.sync.coordinator import Coordinator, Retry
from megarl.reshard.sync.server_link import ServerLink
from megarl.reshard.sync.shard_path import TransferOutcome
from megarl.reshard.transfer.digests import check_digests, check_names
from megarl.reshard.transfer.full_tensor_transfer import DeliveryError, FullTensorSender
from megarl.reshard.transfer.store import Deadline
from megarl.reshard.transfer.transports import disk

Held = list[list[tuple[Box, torch.dtype]]]  # what each rank of a server holds, in its own order


def run(
    chief: Coordinator, named_weights: Iterator[tuple[str, Tensor]], folder: Path | None, host: str, *, verify: str
) -> TransferOutcome:
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
    return TransferOutcome(sender.bytes, sender.bytes, verified, received)


def _sender(
    chief: Coordinator, held: dict[ServerLink, Held], folder: Path | None, deadline: Deadline, verify: str
) -> FullTensorSender:
    boxes: dict[str, set[Box]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for link in chief.active:
        for box, dtype in (item for rank in held[link] for item in rank):
            boxes.setdefault(box.name, set()).add(box)
            if dtypes.setdefault(box.name, dtype) != dtype:
                words = f"it holds {box.name} as {dtype}, another as {dtypes[box.name]}; use reshard.path=exact"
                raise chief.failure(link, ValueError(words))
    return FullTensorSender(
        receivers=list(chief.active),
        bucket_bytes=chief.config.bucket_bytes,
        deadline=deadline,
        dtypes=dtypes,
        boxes=boxes if verify != "off" else {},
        folder=folder,
    )
