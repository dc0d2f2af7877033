"""The knobs of the actor's layout. Imports no torch: the commands read it before anything heavy is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megarl.knobs import UserError, knob


@dataclass(frozen=True)
class ParallelConfig:
    """How the actor is laid out over trainer ranks."""

    tp_size: int = knob(1, "tensor parallel ranks: each layer's matrices are split over them")
    pp_size: int = knob(1, "pipeline parallel ranks: the layers are split over them")
    dp_size: int | None = knob(None, "data parallel replicas; none: all ranks that torchrun gives, else 1")
    timeout_s: float = knob(3600.0, "seconds after which a collective that not every rank has joined is an error")

    def sizes(self) -> dict[str, int]:
        """Every size of the layout, dp worked out."""
        model_ranks = self.tp_size * self.pp_size
        return {"tp_size": self.tp_size, "pp_size": self.pp_size, "dp_size": self.world_size() // model_ranks}

    def world_size(self) -> int:
        """Trainer ranks this layout needs.

        Raises:
            UserError: sizes below 1, or a world (of torchrun) that is not tp * pp * dp.
        """
        for name in ("tp_size", "pp_size", "dp_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"parallel.{name}={value} must be at least 1")
        if self.timeout_s <= 0:
            raise UserError(f"parallel.timeout_s={self.timeout_s} must be above 0")
        model_ranks = self.tp_size * self.pp_size
        given = os.environ.get("WORLD_SIZE")
        if given is None:
            return model_ranks * (self.dp_size or 1)
        world = int(given)
        if world % model_ranks or (self.dp_size is not None and world != model_ranks * self.dp_size):
            raise UserError(
                f"the world has {world} ranks, but parallel.tp_size={self.tp_size} x pp_size={self.pp_size} x "
                f"dp_size={self.dp_size or 'any'} does not make {world}; change the sizes or the number of ranks"
            )
        return world
