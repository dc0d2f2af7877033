"""Processes that start in a moment: forked from one that has imported torch, Megatron and megarl.

The imports cost every process 5 s of a core, and the suite starts over a hundred. What is tested about a start itself
(the launcher, the commands as a user types them) does not come from here.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing import active_children, forkserver, get_context
from subprocess import STDOUT, TimeoutExpired
from typing import BinaryIO
from unittest import mock

import torch

from megarl.launcher import local
from megarl.processes import die_with_parent

PRELOAD = ("megarl.actor.critic", "megarl.actor.policy", "megarl.trainer.rl", "megarl.trainer.sft")
CONTEXT = get_context("forkserver")
SERVER = f"{__package__}.fork_server" if __package__ else "fork_server"
CONTEXT.set_forkserver_preload([*PRELOAD, __name__, SERVER])


def used() -> AbstractContextManager[object]:
    """Has the launcher fork its ranks from here."""
    return mock.patch.object(local, "subprocess", sys.modules[__name__])


@atexit.register
def kill_all() -> None:
    """Kills what still runs, after Ctrl-C say; multiprocessing's own handler, which runs later, would wait for it."""
    for process in active_children():
        process.kill()


def become(environment: dict[str, str], output: str | None) -> None:
    """Gives this process a session of its own, and the environment and output that it would have been started with."""
    os.setsid()
    die_with_parent(os.getppid())
    os.environ.clear()
    os.environ.update(environment | ({local.PARENT: str(os.getppid())} if local.PARENT in environment else {}))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    torch.compiler.set_stance("force_eager")  # what Megatron compiles would be traced anew in every process
    if output:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)


def run_module(module: str, arguments: list[str], environment: dict[str, str], output: str | None) -> None:
    """Runs a module as `python -m` does. The ranks of a command are forked from the server that it was forked from."""
    become(environment, output)
    forkserver._forkserver.ensure_running = lambda: None  # a child of it would start a server of its own
    local.subprocess = sys.modules[__name__]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Popen:
    """`subprocess.Popen` of `python -m module arguments`, as far as the launcher and the tests of commands use it."""

    run: Callable[..., None] = staticmethod(run_module)  # in the new process

    def __init__(
        self,
        command: list[str],
        *,
        stdout: BinaryIO | None,
        stderr: BinaryIO | int | None,
        start_new_session: bool,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        _, flag, module, *arguments = command
        assert flag == "-m"
        assert stderr in (stdout, STDOUT)
        assert start_new_session
        output = stdout.name if stdout else None
        self._process = CONTEXT.Process(target=self.run, args=(module, arguments, dict(env), output))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
