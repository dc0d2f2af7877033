"""Shared memory of one machine: the receiver reads the sender's staging buffers, without a copy in between."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.reshard.transfer.transports.base import SLOTS, Staging
from megarl.reshard.transfer.transports.mapped import MappedTransport

FOLDER = Path("/dev/shm")
PREFIX = "megarl-"


class SharedStaging(Staging):
    """Staging buffers in a file of shared memory that only this user may open.

    The file is locked while its process lives. The next one that makes staging removes files of killed ones.
    """

    def __init__(self, bucket_bytes: int):
        self.bucket_bytes = bucket_bytes
        remove_abandoned()
        self.path = FOLDER / f"{PREFIX}{secrets.token_hex(16)}"
        self._lock = _locked(self.path)
        try:
            os.posix_fallocate(self._lock, 0, SLOTS * bucket_bytes)  # full shared memory fails here, not in a copy
        except OSError as error:
            self.close()
            raise OSError(
                f"{FOLDER} has no room for {SLOTS} staging buffers of {bucket_bytes} bytes: {error}; lower "
                "reshard.bucket_bytes, or give the container more shared memory"
            ) from error
        self.slots = map_file(self.path, bucket_bytes)

    def close(self) -> None:
        self.slots = []
        self.path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(path: Path) -> int:
    """Creates a file that belongs to this process while the returned descriptor is open."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another process took it for abandoned before it was locked


def remove_abandoned() -> None:
    """Removes this user's staging files whose process was killed: nobody has them locked."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, just removed, another user's, or no file
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


class ShmTransport(MappedTransport):
    """Messages in a file of shared memory that the receiver maps by its name."""

    memory = "shared"

    @classmethod
    def make_staging(cls, bucket_bytes: int) -> SharedStaging:
        return SharedStaging(bucket_bytes)

    def describe(self) -> Any:
        assert isinstance(self.staging, SharedStaging), "made by make_staging"
        return [self.staging.path.name, self.staging.bucket_bytes]

    def map(self, described: Any) -> list[Tensor]:
        name, bucket_bytes = described
        path = FOLDER / str(name)
        if path.name != name or not path.name.startswith(PREFIX):
            raise ValueError(f"{name!r} is not the name of a staging file")
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a file of this user")
        if status.st_size != SLOTS * int(bucket_bytes):
            raise ValueError(f"{path} has {status.st_size} bytes, and not {SLOTS} x {bucket_bytes}")
        return map_file(path, int(bucket_bytes))


def map_file(path: Path, bucket_bytes: int) -> list[Tensor]:
    """The staging buffers in a file, as tensors whose memory is the file's."""
    memory = torch.from_file(str(path), shared=True, size=SLOTS * bucket_bytes, dtype=torch.uint8)
    return list(memory.split(bucket_bytes))
