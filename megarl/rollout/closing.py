"""Closes what a part of a run has opened, so that an error while closing never hides the one that ends the run."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Calls `close`. What it raises is logged after an `error`, and raised without one."""
    try:
        close()
    except Exception as later:
        if error is None:
            raise
        log.error("while the run ended: %s: %s", type(later).__name__, later)
