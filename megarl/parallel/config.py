"""Knobs of the actor's layout. Imports no torch, because the commands read it before anything heavy is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megarl.knobs import MAX_SECONDS, UserError, check_ranges, knob

MAX_RANKS = 16_384  # a plan for more would take gigabytes


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of the actor over tp x pp x cp x dp trainer ranks."""

    tp_size: int = knob(1, "tensor parallel ranks: each layer's matrices are split over them", least=1, most=MAX_RANKS)
    pp_size: int = knob(1, "pipeline parallel ranks: the layers are split over them", least=1, most=MAX_RANKS)
    vpp_size: int = knob(
        1,
        "virtual stages of each pipeline rank; above 1 they interleave, for a shorter bubble",
        least=1,
        most=MAX_RANKS,
    )
    cp_size: int = knob(1, "context parallel ranks: each sequence is cut over them", least=1, most=MAX_RANKS)
    dp_size: int | None = knob(
        None, "data parallel replicas; none: all ranks that torchrun gives, else 1", least=1, most=MAX_RANKS
    )
    ep_size: int = knob(
        1,
        "expert parallel ranks, out of tp x cp x dp: a MoE layer's experts are split over them",
        least=1,
        most=MAX_RANKS,
    )
    etp_size: int | None = knob(None, "tensor parallel ranks of each expert; none: tp_size", least=1, most=MAX_RANKS)
    sequence_parallel: bool = knob(False, "split tokens over tp ranks where a layer's matrices are not split")
    overlap: bool | None = knob(
        None,
        "reduce gradients during backward, gather parameters during forward, run shared experts of te beside exchanges "
        "of tokens; none: on GPUs",
    )
    tp_comm_overlap: bool = knob(
        False,
        "tp collectives in pieces beside te's products; microbatches are padded to max_tokens_per_mb",
    )
    first_stage_layers: int = knob(
        0, "layers of the first pipeline rank; 0: as many as the others", least=0, most=10_000
    )
    last_stage_layers: int = knob(0, "layers of the last pipeline rank; 0: as many as the others", least=0, most=10_000)
    timeout_s: float = knob(
        3600.0,
        "seconds without a new stage or collective on a rank, after which the run is ended",
        above=0,
        most=MAX_SECONDS,
    )

    @property
    def expert_tp_size(self) -> int:
        """Resolved `etp_size`: tp_size if it is None."""
        return self.tp_size if self.etp_size is None else self.etp_size

    def sizes(self) -> dict[str, int]:
        """Returns the sizes whose product is the world size, with dp resolved."""
        rest = self.tp_size * self.pp_size * self.cp_size
        return {
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "cp_size": self.cp_size,
            "dp_size": self.world_size() // rest,
        }

    def world_size(self) -> int:
        """Returns the number of trainer ranks, from WORLD_SIZE if torchrun set it.

        Raises:
            UserError: see `check`, or WORLD_SIZE is not tp * pp * cp * dp.
        """
        self.check()
        rest = self.tp_size * self.pp_size * self.cp_size
        announced_world = os.environ.get("WORLD_SIZE")
        world = rest * (self.dp_size or 1) if announced_world is None else int(announced_world)
        if world % rest or (self.dp_size is not None and world != rest * self.dp_size):
            raise UserError(
                f"the world has {world} ranks, but parallel.tp_size={self.tp_size} x pp_size={self.pp_size} x "
                f"cp_size={self.cp_size} x dp_size={self.dp_size or 'any'} does not make {world}; change the sizes or "
                "the number of ranks"
            )
        if world > MAX_RANKS:
            raise UserError(
                f"parallel.tp_size={self.tp_size} x pp_size={self.pp_size} x cp_size={self.cp_size} x dp_size="
                f"{self.dp_size or 'any'} makes {world} ranks, over the {MAX_RANKS} of the largest run; lower one"
            )
        experts = self.expert_tp_size * self.ep_size
        if (world // self.pp_size) % experts:
            raise UserError(
                f"parallel.ep_size={self.ep_size} x etp_size={self.expert_tp_size} does not divide the "
                f"{world // self.pp_size} ranks of tp_size={self.tp_size} x cp_size={self.cp_size} x "
                f"dp_size={world // rest} that experts are laid out over; change one of them"
            )
        return world

    def check(self) -> None:
        """Refuses values that fit no model and no number of ranks.

        Raises:
            UserError: with the name of the knob.
        """
        check_ranges(self, "parallel")
        for name in ("first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            if value and self.pp_size == 1:
                raise UserError(f"parallel.{name}={value} needs pipeline stages; set parallel.pp_size above 1")
        if self.vpp_size > 1 and self.pp_size == 1:
            raise UserError(f"parallel.vpp_size={self.vpp_size} needs parallel.pp_size above 1; set it, or vpp_size=1")
        if self.sequence_parallel and self.tp_size == 1:
            raise UserError("parallel.sequence_parallel=true needs parallel.tp_size above 1; set it, or turn it off")
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise UserError(
                "parallel.tp_comm_overlap=true needs parallel.sequence_parallel=true; set it, or turn it off"
            )
        if self.tp_comm_overlap and self.cp_size > 1:
            raise UserError(
                f"parallel.tp_comm_overlap=true pads whole sequences, and parallel.cp_size={self.cp_size} cuts them; "
                "set it to false, or cp_size to 1"
            )

    def stage_layers(self, num_layers: int) -> list[list[range]]:
        """Returns the layers, counted from 0, of `[pp rank][virtual stage]`, in Megatron's order.

        Virtual stage v of all ranks comes before virtual stage v + 1 of any rank.

        Raises:
            UserError: the layers cannot be split evenly, or a rank would have none.
        """
        ends = {0: self.first_stage_layers, self.pp_size - 1: self.last_stage_layers} if self.pp_size > 1 else {}
        fixed = {rank: layers for rank, layers in ends.items() if layers}
        remaining, ranks = num_layers - sum(fixed.values()), self.pp_size - len(fixed)
        uneven_knobs = "".join(
            f", parallel.{name}={getattr(self, name)}"
            for name in ("first_stage_layers", "last_stage_layers")
            if getattr(self, name)
        )
        if remaining < 0 or (remaining == 0) != (ranks == 0) or (ranks and remaining % ranks):
            raise UserError(
                f"parallel.pp_size={self.pp_size}{uneven_knobs} does not divide the model's {num_layers} layers: "
                f"{remaining} are left for {ranks} ranks; set first_stage_layers and last_stage_layers so that the "
                "rest is even"
            )
        counts = [fixed.get(rank, remaining // ranks if ranks else 0) for rank in range(self.pp_size)]
        for rank, count in enumerate(counts):
            if count % self.vpp_size:
                raise UserError(
                    f"parallel.vpp_size={self.vpp_size} does not divide the {count} layers of pipeline rank {rank} "
                    f"(parallel.pp_size={self.pp_size}{uneven_knobs}, {num_layers} layers); choose a divisor of {count}"
                )
        stages: list[list[range]] = [[] for _ in range(self.pp_size)]
        start = 0
        for _ in range(self.vpp_size):
            for rank, count in enumerate(counts):
                stages[rank].append(range(start, start + count // self.vpp_size))
                start += count // self.vpp_size
        return stages
