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
from megarl.observe.run_folder import RunFolder

OWNER = "owner.json"
ENDING_S = 20.0  # an owner that was told to end is waited for this long


class RunTakenError(RuntimeError):
    """Another command opened the run folder. The message names it."""


class RunOwner:
    """Claim of this process to a run folder."""

    def __init__(self, folder: RunFolder) -> None:
        """Takes the folder from its owner, if it has one."""
        self.folder, self._token = folder, secrets.token_hex(8)
        pid = os.getpid()
        facts = {
            "token": self._token,
            "host": socket.gethostname(),
            "pid": pid,
            "process_started": psutil.Process(pid).create_time(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        new = folder.path / f"{OWNER}.{self._token}"
        new.write_text(json.dumps(facts))
        new.replace(folder.path / OWNER)

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
    """Refuses a run folder whose owner still runs on this host after `ENDING_S`. Other hosts are not seen.

    Raises:
        UserError: with the process.
    """
    deadline = time.monotonic() + ENDING_S
    while _runs(owner := _read(folder.path)):
        if time.monotonic() > deadline:
            raise UserError(
                f"resume={folder.path} is still trained by process {owner['pid']} on this host since {owner['since']}; "
                "end it first, or copy the folder and resume the copy"
            )
        time.sleep(0.2)


def _read(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        owner: dict[str, Any] = json.loads((folder / OWNER).read_text())
        return owner
    return {}


def _runs(owner: dict[str, Any]) -> bool:
    """True for another process of this host that has not ended."""
    if not owner or owner["host"] != socket.gethostname() or owner["pid"] == os.getpid():
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(owner["pid"])
        same = abs(process.create_time() - owner["process_started"]) < 1
        return same and process.status() != psutil.STATUS_ZOMBIE
    return False
