"""Ends a process together with its parent, and lets it open as many files as it may."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MANY_FILES = 2**16  # some programs look at each number up to their limit


def die_with_parent(parent_pid: int) -> None:
    """Asks Linux to SIGKILL this process when its parent ends. Exits at once if the parent has already ended.

    The parent is the thread that started this process, see prctl(2).
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"the process {parent_pid} that started this one is gone")


def open_many_files() -> None:
    """Raises this process's limit of open files to MANY_FILES, or as far as it may.

    Login shells allow 1,024. A rollout has a connection for each request under way, and a sync several for each server.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if most == resource.RLIM_INFINITY else min(MANY_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
