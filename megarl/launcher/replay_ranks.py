"""Starts the ranks that take steps of a run again."""

from __future__ import annotations

from pathlib import Path

from megarl import cli
from megarl.knobs import UserError
from megarl.launcher.local import run_ranks
from megarl.trainer.replay.checks import overrides_of
from megarl.trainer.replay.order import Order, write_order
from megarl.trainer.replay.source import Source

RANK_MODULE = "megarl.replay"


def take_steps(order: Order, folder: Path) -> None:
    """Has ranks of the order's layout take its steps. They write to `folder`, which is new.

    Raises:
        UserError: a rank failed; what it wrote is above.
    """
    folder.mkdir()
    config = cli.composed(order.overrides)
    world, file = config.parallel.world_size(), write_order(order, folder)
    if code := run_ranks(RANK_MODULE, [str(file)], world, folder, config.parallel.timeout_s):
        raise UserError(f"the replay on {world} rank{'s' * (world > 1)} ended with code {code}; see above")


def state_before(source: Source, work: Path) -> str:
    """Folder of the checkpoint before the source's last batch; "" is the run's start. The run's own knobs make it.

    Raises:
        UserError: a rank failed.
    """
    state, batches = str(source.checkpoint or ""), [str(path) for path in source.batches]
    if len(batches) == 1:
        return state
    take_steps(Order(overrides_of(source.facts), batches[:-1], state, save_to=str(work / "states")), work / "before")
    return str(work / "states" / f"step_{source.facts.step - 1:06d}")
