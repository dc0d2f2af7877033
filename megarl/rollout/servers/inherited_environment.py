"""Environment that a server inherits: the trainer's, without what is the trainer's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megarl.parallel import hardware_queues

# A rank's place, as torchrun and the launchers tell it. With TORCHELASTIC_USE_AGENT_STORE=True torch makes every rank a
# client of a store that torchrun has (torch/distributed/rendezvous.py): SGLang's ranks would wait for one for ever.
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # options of torch's allocator
TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_")  # prefixes
NOT_WHERE_MEMORY_IS_GIVEN_UP = "expandable_segments"  # torch_memory_saver refuses it


def inherited(environment: Mapping[str, str], colocated: bool) -> dict[str, str]:
    """Copies an environment for a server, whose kernels need no order of calls (`hardware_queues`).

    A co-located server gives up its memory by torch_memory_saver, so it takes no expandable segments. Programs of this
    environment come first on PATH: SGLang calls `ninja` by its name to compile kernels, also where no one activated it.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name != hardware_queues.VARIABLE and name not in PLACE and not name.startswith(TORCHRUN)
    }
    kept["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    for name in ALLOCATOR if colocated else ():
        if name in kept:
            kept[name] = _without_segments(kept[name])
    return kept


def _without_segments(options: str) -> str:
    """Takes one option out of `name:value,name:value`. A value may be a list in brackets, with commas inside."""
    parts = [part for part in options.split(",") if part.split(":")[0].strip() != NOT_WHERE_MEMORY_IS_GIVEN_UP]
    return ",".join(parts)
