"""How the processes of a job on several machines find each other: by a folder that all of them see.

Each process that is waited for publishes its address there as a small file, written aside and renamed, so that nobody
reads half of one. A folder serves one attempt of a job: what an earlier attempt left is never read.

MEGARL_JOB_FOLDER is that folder. MEGARL_INTERFACE names the network interface that everything of the job listens on and
talks over, and nothing listens on another; without it, the interface of the default route.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megarl.knobs import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

JOB_FOLDER = "MEGARL_JOB_FOLDER"
INTERFACE = "MEGARL_INTERFACE"
TRAINER = "trainer"  # where the ranks' store listens
ENDED = "trainers-ended"  # the servers are no longer needed
POLL_S = 0.1
ROUTES = Path("/proc/net/route")


def job_folder() -> Path | None:
    """The folder where the processes of this job meet; None where all run on this machine."""
    given = os.environ.get(JOB_FOLDER)
    return Path(given) if given else None


def server_name(index: int) -> str:
    """What server `index` publishes its address as."""
    return f"server_{index}"


def publish(folder: Path, name: str, text: str) -> None:
    """Makes `folder/name` hold `text`, in one step."""
    aside = folder / f".{name}.{socket.gethostname()}.{os.getpid()}"
    aside.write_text(text)
    aside.replace(folder / name)


def awaited(folder: Path, name: str, timeout_s: float) -> str:
    """What was published as `name`, waited for.

    Raises:
        TimeoutError: it was not within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        os.listdir(folder)  # has a network file system look again
        try:
            return (folder / name).read_text()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody published {folder / name} within {timeout_s:g} s") from None
        time.sleep(POLL_S)


def interface() -> str:
    """The name of the job's network interface on this machine.

    Raises:
        UserError: it has no IPv4 address here, or none is named and there is no default route.
    """
    name = os.environ.get(INTERFACE) or _default_route()
    if not name:
        raise UserError(f"this machine has no default route; set {INTERFACE} to one of {', '.join(_with_addresses())}")
    if name not in _with_addresses():
        raise UserError(
            f"{INTERFACE}={name} has no IPv4 address on {socket.gethostname()}; "
            f"choose one of {', '.join(_with_addresses())}"
        )
    return name


def own_address() -> str:
    """The IPv4 address to listen on: of the job's interface, or 127.0.0.1 where all run on this machine."""
    return _with_addresses()[interface()] if job_folder() is not None else "127.0.0.1"


def _with_addresses() -> dict[str, str]:
    """Interfaces of this machine with an IPv4 address, and its first one."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                found.setdefault(name, address.address)
    return found


def _default_route() -> str:
    """The interface of the default route with the lowest metric; "" if there is none."""
    rows = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if row[1] == "00000000" and row[7] == "00000000"]
    return min(defaults)[1] if defaults else ""


def ranks_store(folder: Path, rank: int, world_size: int, timeout: timedelta) -> Store:
    """The store that the trainer ranks of several machines meet at; rank 0 serves it on the job's interface alone.

    Collectives over sockets are told to use the same interface.

    Raises:
        TimeoutError: rank 0 published no address within `timeout`.
    """
    from torch.distributed import TCPStore

    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, interface())
    if rank:
        host, port = awaited(folder, TRAINER, timeout.total_seconds()).rsplit(":", 1)
        return TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
    host = own_address()
    listener = socket.create_server((host, 0))  # torch's own listener would take all addresses
    number = listener.getsockname()[1]
    publish(folder, TRAINER, f"{host}:{number}")
    return TCPStore(
        *(host, number, world_size),
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
