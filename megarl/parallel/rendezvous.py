"""Rendezvous of a job on several machines, through a shared folder.

A process publishes its address there as a small file. It writes a temporary file and renames it, so that no reader sees
a partial one. Each attempt of a job has its own folder and never reads the files of an earlier attempt.

MEGARL_JOB_FOLDER is the folder. MEGARL_INTERFACE names the only network interface on which the job listens and talks.
The default is the interface of the default route.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megarl.knobs import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

JOB_FOLDER = "MEGARL_JOB_FOLDER"
INTERFACE = "MEGARL_INTERFACE"
TRAINER = "trainer"  # name of the published address of the ranks' store
ENDED = "trainers-ended"  # published when the servers are no longer needed
POLL_S = 0.1
ROUTES = Path("/proc/net/route")


def job_folder() -> Path | None:
    """Returns the shared folder of this job; None if all processes run on this machine."""
    folder = os.environ.get(JOB_FOLDER)
    return Path(folder) if folder else None


def server_name(index: int) -> str:
    """Returns the name under which server `index` publishes its address."""
    return f"server_{index}"


def failure_name(index: int) -> str:
    """Returns the name under which server `index` publishes why it did not start."""
    return f"{server_name(index)}.failed"


class PublishedFailure(Exception):
    """Raised with the text of a failure that another process of the job published."""


def publish(folder: Path, name: str, text: str) -> None:
    """Writes `text` to `folder/name` atomically."""
    temporary = folder / f".{name}.{socket.gethostname()}.{os.getpid()}"
    temporary.write_text(text)
    temporary.replace(folder / name)


def awaited(folder: Path, name: str, timeout_s: float, failures: Sequence[str] = ()) -> str:
    """Waits for the text published as `name`.

    Raises:
        TimeoutError: nothing was published within `timeout_s` seconds.
        PublishedFailure: one of `failures` was published first.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        present = os.listdir(folder)  # makes a network file system refresh its view
        for failure in failures:
            if failure in present:
                raise PublishedFailure((folder / failure).read_text())
        try:
            return (folder / name).read_text()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody published {folder / name} within {timeout_s:g} s") from None
        time.sleep(POLL_S)


def interface() -> str:
    """Returns the name of the job's network interface on this machine.

    Raises:
        UserError: the interface has no IPv4 address, or MEGARL_INTERFACE is not set and there is no default route.
    """
    name = os.environ.get(INTERFACE) or _default_route()
    if not name:
        raise UserError(f"this machine has no default route; set {INTERFACE} to one of {', '.join(_ipv4_addresses())}")
    if name not in _ipv4_addresses():
        raise UserError(
            f"{INTERFACE}={name} has no IPv4 address on {socket.gethostname()}; "
            f"choose one of {', '.join(_ipv4_addresses())}"
        )
    return name


def own_address() -> str:
    """Returns the IPv4 address to listen on: the job interface's, or 127.0.0.1 if all run on this machine."""
    return _ipv4_addresses()[interface()] if job_folder() is not None else "127.0.0.1"


def _ipv4_addresses() -> dict[str, str]:
    """Returns this machine's network interfaces with their first IPv4 address."""
    addresses_by_name: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                addresses_by_name.setdefault(name, address.address)
    return addresses_by_name


def _default_route() -> str:
    """Returns the interface of the default route with the lowest metric; "" if there is none."""
    rows = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and row[7] == "00000000"]
    return min(defaults)[1] if defaults else ""


def use_interface() -> None:
    """Has gloo and NCCL use the job's interface for the sockets of this process and those that it starts."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface())


def ranks_store(folder: Path, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Opens the store of the trainer ranks on several machines; rank 0 serves it on the job's interface only.

    Gloo and NCCL get the same interface.

    Raises:
        TimeoutError: rank 0 published no address within `timeout`.
    """
    from torch.distributed import TCPStore

    use_interface()
    if rank:
        host, port = awaited(folder, TRAINER, timeout.total_seconds()).rsplit(":", 1)
        return TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
    host = own_address()
    listener = socket.create_server((host, 0))  # torch's own listener would listen on all addresses
    port_number = listener.getsockname()[1]
    publish(folder, TRAINER, f"{host}:{port_number}")
    return TCPStore(
        *(host, port_number, world_size),
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
