"""Prepares the fork server of `warm.py`; loaded in the server alone, after everything else.

It ends with the process that started it. The server's own rule is not enough: its children hold the pipe whose end it
waits for, and they wait for the server. What was imported is left out of the collections of garbage in its children.
"""

import gc
import os
import signal
from types import FrameType

PARENT = os.getppid()
EVERY_S = 1.0


def look(_: int, __: FrameType | None) -> None:
    """Ends the server if its parent has; the kernel then kills the server's children (`warm.become`)."""
    if os.getppid() != PARENT:
        os._exit(1)


signal.signal(signal.SIGALRM, look)
signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
gc.collect()
gc.freeze()
