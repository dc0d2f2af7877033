"""Ends what a test process started once that process has ended, by Ctrl-C or SIGKILL too.

pytest-xdist kills its workers seconds after Ctrl-C, before fixtures have closed. Jobs of Slurm and ranks of a launcher
have sessions of their own, which Ctrl-C does not reach. All that a test starts has a mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

import psutil

MARK = "MEGARL_TEST_SESSION"  # in the environment of every process that a test starts
END_S = 600.0  # for a hang alone


def start(mark: str) -> int:
    """Starts the guardian of this process. Returns its id: it is no process that a test left behind."""
    command = [sys.executable, __file__, str(os.getpid()), mark]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True).pid


def marked(mark: str) -> list[psutil.Process]:
    """Other processes with the mark, but those that have ended and wait to be reaped."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
    return found


def watch(pid: int, mark: str) -> None:
    """Waits for the end of the process, then kills until nothing with the mark is left."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        select.select([os.pidfd_open(pid)], [], [])
    deadline = time.monotonic() + END_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
