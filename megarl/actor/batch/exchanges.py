"""Exchanges of tensors between pipeline stages, whose shapes each rank knows before a pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

from megarl.parallel.groups import Groups

REMEDY = "megarl/actor/batch/exchanges.py must plan what Megatron's schedule does"


class PlannedExchanges(P2PCommunicator):
    """Exchanges of one pass between this rank and its neighbours in the pipeline. No shapes travel.

    Tensors are `[local tokens, 1, hidden]`, and all stages hold microbatches of the same lengths. Both ends of a link
    take microbatches in the order of Megatron's schedule table (schedules.py:962): group by group, once for each
    virtual stage.

    Raises:
        RuntimeError: the schedule exchanges something else than was planned. It is raised before the exchange starts.
    """

    def __init__(self, groups: Groups, config: ModelParallelConfig, tokens: Sequence[int], forward_only: bool) -> None:
        """Plans a pass over microbatches of `tokens` tokens, on this rank's part of the sequences (cp)."""
        super().__init__(groups.pp, config)
        split = groups.tp_size if config.sequence_parallel else 1
        order = get_schedule_table(len(tokens), groups.vpp_size, config.microbatch_group_size_per_vp_stage)

        def shapes(end: bool) -> deque[list[int]]:
            """Shapes of all microbatches; at an end of the model one virtual stage has no neighbour."""
            return deque([tokens[mb] // split, 1, config.hidden_size] for mb, place in order if place or not end)

        first, last = groups.pp_rank == 0, groups.is_last_stage
        self._planned = {"receive an activation": shapes(first), "send an activation": shapes(last)}
        if not forward_only:
            self._planned |= {"receive a gradient": shapes(last), "send a gradient": shapes(first)}

    def _next(self, exchange: str) -> list[int]:
        """Takes the shape of the next exchange of this kind."""
        if not self._planned.get(exchange):
            raise RuntimeError(
                f"the schedule has pipeline stage {self.current_stage} {exchange} beyond the planned ones; {REMEDY}"
            )
        return self._planned[exchange].popleft()

    def _check_sent(self, exchange: str, tensor: Tensor) -> None:
        """Compares a tensor with the shape that the neighbour awaits."""
        planned = self._next(exchange)
        if list(tensor.shape) != planned:
            raise RuntimeError(
                f"the schedule has pipeline stage {self.current_stage} {exchange} of shape {list(tensor.shape)} in "
                f"place of {planned}; {REMEDY}"
            )

    def check_end(self) -> None:
        """Checks after a pass that every planned exchange took place."""
        left = {exchange: len(shapes) for exchange, shapes in self._planned.items() if shapes}
        if left:
            raise RuntimeError(
                f"the schedule left out exchanges of pipeline stage {self.current_stage}: {left}; {REMEDY}"
            )

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Gives the shapes to receive from both neighbours; [] where nothing comes. Megatron sends messages here."""
        if tensor_send_next is not None:
            self._check_sent("send an activation", tensor_send_next)
        if tensor_send_prev is not None:
            self._check_sent("send a gradient", tensor_send_prev)
        return (
            self._next("receive an activation") if recv_prev else [],
            self._next("receive a gradient") if recv_next else [],
        )
