"""SGLang's CPU servers that start in a moment: forked from a process that has imported SGLang.

The imports cost every server 5 to 10 s of a core. Runs that a test starts by a command, and tests of a server's start,
take servers that begin as `python -m` does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from multiprocessing import forkserver
from subprocess import DEVNULL, STDOUT, TimeoutExpired
from typing import BinaryIO
from unittest import mock

from setproctitle import setproctitle

from megarl.rollout.servers import sglang_server
from tests import warm

__all__ = ["DEVNULL", "STDOUT", "Popen", "TimeoutExpired"]

SERVER = forkserver.ForkServer()
SERVER.set_forkserver_preload([f"{__package__}.imported_sglang", __name__, f"{__package__}.fork_server"])


def used() -> AbstractContextManager[object]:
    """Has `sglang_server.py` start servers from here."""
    return mock.patch.object(sglang_server, "subprocess", sys.modules[__name__])


def run_server(module: str, arguments: list[str], environment: dict[str, str], output: str | None) -> None:
    """Runs the module with the server of forks as the parent that it must not outlive."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    tempfile.tempdir = None  # of the imports; the server's own is in its environment
    setproctitle(" ".join(["python", "-m", module, *arguments]))
    warm.run_module(module, [str(os.getppid()), *arguments[1:]], environment, output)


class Popen(warm.Popen):
    """`subprocess.Popen` of `python -m module PARENT_PID arguments`, as far as `sglang_server.py` uses it."""

    run = staticmethod(run_server)

    def __init__(
        self,
        command: list[str],
        *,
        stdin: int,
        stdout: BinaryIO,
        stderr: int,
        start_new_session: bool,
        env: Mapping[str, str],
    ) -> None:
        assert stdin == DEVNULL
        with mock.patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process):
            super().__init__(command, stdout=stdout, stderr=stderr, start_new_session=start_new_session, env=env)

    @property
    def returncode(self) -> int | None:
        return self.poll()
