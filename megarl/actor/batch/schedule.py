"""Runs microbatches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from megarl.actor.batch.exchanges import PlannedExchanges
from megarl.actor.batch.feed import Feed
from megarl.actor.batch.microbatch import Microbatch
from megarl.parallel.groups import Groups


def run(
    ddps: Sequence[DistributedDataParallel],
    microbatches: Sequence[Microbatch],
    feed: Feed,
    process: Callable[[Tensor, Microbatch], Any],
    groups: Groups,
    forward_only: bool,
    passing: Callable[[Microbatch], AbstractContextManager[None]] | None = None,
) -> list[Any]:
    """Runs one pass over the microbatches: forward, and backward unless `forward_only`.

    `feed` brings them from the host to the device.

    `process(output, microbatch)` runs on the last stage. It returns the results of a loss function for Megatron's
    schedules: the loss, a number of tokens, and a report. Virtual stages take microbatches in groups of pp, so the
    number of microbatches must be a multiple of pp (see `microbatch.plan_microbatches`). `passing` is the context of a
    microbatch's forward pass, without its backward.

    Returns:
        The reports, in the microbatches' order, on ranks with the last stage; an empty list on the others.
    """

    def forward_step(iterator: Iterator[Microbatch], module: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        mb = next(iterator)
        with passing(mb) if passing is not None else nullcontext():
            output = module(mb.input_ids[None], None, None, packed_seq_params=mb.packed)
        return output, lambda out: process(out, mb)

    iterators = feed.iterators(microbatches, len(ddps))
    exchanges = None
    if groups.pp_size > 1:
        tokens = [len(mb.input_ids) for mb in microbatches]
        exchanges = PlannedExchanges(groups, get_model_config(ddps[0]), tokens, forward_only)
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if groups.vpp_size > 1 else iterators[0],
        model=list(ddps),
        num_microbatches=len(microbatches),
        seq_length=1,  # unused: the exchanges know their shapes
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=exchanges,
        pg_collection=groups.collection if exchanges is not None else None,
    )
    if exchanges is not None:
        exchanges.check_end()
    return reports


def as_loss(process: Callable[[Tensor, Microbatch], Tensor]) -> Callable[[Tensor, Microbatch], Any]:
    """Wraps `process` as a loss function of Megatron's schedules, with its result as the report."""

    def wrapped(output: Tensor, mb: Microbatch) -> tuple[Tensor, Tensor, Tensor]:
        no_loss = torch.zeros([], device=output.device)  # with experts, Megatron copies a scale from its device
        return no_loss, torch.zeros([], dtype=torch.int), process(output, mb)

    return wrapped
