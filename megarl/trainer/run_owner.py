"""Owner of a run folder: the command that opened it last. An earlier one ends before it writes more.

Two commands in one folder would remove each other's checkpoints. A lock on a network's file system may outlive its
host, so each command leaves its token in the folder, and reads it again before it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from megarl.knobs import UserError
from megarl.observe.run_folder import ADAPTERS, RunFolder, RunTakenError
from megarl.parallel import rendezvous

OWNER = "owner.json"
ENDING_S = 20.0  # an owner that was told to end is waited for this long


class RunOwner:
    """Claim of this process to a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        """Takes the folder from its owner, if it has one."""
        self.folder, self._token = folder, secrets.token_hex(8)
        pid = os.getpid()
        facts = {
            "token": self._token,
            "folder": _place(folder),  # a copy of the folder is nobody's
            "host": socket.gethostname(),
            "pid": pid,
            "process_started": psutil.Process(pid).create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        rendezvous.publish(folder.path, OWNER, json.dumps(facts))

    def check(self) -> None:
        """Reads the folder's owner again. A folder whose file is gone is nobody else's.

        Raises:
            RunTakenError: it is another command's by now.
        """
        owner = _read(self.folder.path)
        if owner.get("token", self._token) != self._token:
            raise RunTakenError(
                f"{self.folder.path} was opened by process {owner['pid']} on {owner['host']} at {owner['since']}, and "
                "two commands cannot write one run; this one ends. Let one go on, or copy the folder first"
            )


def check_ended(folder: RunFolder) -> None:
    """Refuses a run folder, or one of its adapters', whose owner still runs here after `ENDING_S`.

    Processes of other hosts are not seen.

    Raises:
        UserError: with the process.
    """
    deadline = time.monotonic() + ENDING_S
    for run in (folder, *map(RunFolder, (folder.path / ADAPTERS).glob("*"))):
        while _runs(owner := _read(run.path), run):
            if time.monotonic() > deadline:
                raise UserError(
                    f"resume={run.path} is still trained by process {owner['pid']} on this host since "
                    f"{owner['since']}; end it first, or copy the folder and resume the copy"
                )
            time.sleep(0.2)


def _place(folder: RunFolder) -> str:
    return str(folder.path.resolve())


def _read(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        owner: dict[str, Any] = json.loads((folder / OWNER).read_text())
        return owner
    return {}


def _runs(owner: dict[str, Any], folder: RunFolder) -> bool:
    """True if the owner of this folder is another process of this host that has not ended."""
    if not owner or owner["host"] != socket.gethostname() or owner["pid"] == os.getpid():
        return False
    if owner["folder"] != _place(folder):
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(owner["pid"])
        same = abs(process.create_time() - owner["process_started"]) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False
