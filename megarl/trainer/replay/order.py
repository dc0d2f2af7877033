"""Passes the order of a replay from the command to its ranks, and names the files that rank 0 writes for it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

STATS, FIGURES = "stats.json", "batch.safetensors"  # what rank 0 writes beside the order


@dataclass(frozen=True)
class Order:
    """Steps that the ranks of one layout take."""

    overrides: list[str]  # of the whole configuration
    batches: list[str]  # files of the steps, in order
    state: str = ""  # checkpoint before the first of them; "": the run's start
    save_to: str = ""  # folder for a checkpoint after the last of them; "": none is written
    hf_to: str = ""  # folder for the actor after them as a HF checkpoint; "": none is written
    compare_to: str = ""  # checkpoint to compare the state after the last of them with; "": none


def write_order(order: Order, work: Path) -> Path:
    """Writes an order for its ranks and returns its file."""
    file = work / "order.json"
    file.write_text(json.dumps(asdict(order)))
    return file


def read_order(file: Path) -> Order:
    """Reads the order in a file."""
    return Order(**json.loads(file.read_text()))
