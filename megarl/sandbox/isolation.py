"""Isolates the calling process, without privileges, before it runs code that nobody has read. Standard library only.

Three layers, from the outside in. Each of the last two holds without the first, which some machines forbid:

- Namespaces of its own for users, mounts and System V IPC, where the kernel gives them: no capability, and files in
  memory, of bounded size.
- Landlock (https://docs.kernel.org/userspace-api/landlock.html): reads from Python, its libraries and a folder, writes
  to that folder.
- seccomp: the allow-list of `system_calls`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.sandbox.system_calls import AUDIT_ARCH, seccomp_filter

OLDEST_KERNEL = "5.13"  # has Landlock's first version, which is enough
MAX_THREADS = 64
MAX_FILE = 16 * 2**20
MAX_FILES = 1024
FILES_IN_MEMORY = 64 * 2**20

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000  # linux/sched.h
MS_PRIVATE_REC, MS_NOSUID_NODEV_NOEXEC = 0x44000, 0xE  # linux/mount.h
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
CAPABILITY_VERSION_3 = 0x20080522

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
# linux/landlock.h: rights on files by the version that adds them; all are denied unless a path is given them.
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
EXECUTE, WRITE, READ, LIST, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
DEVICES_AND_SOCKETS = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 15  # making them, and commands to devices
NET_RIGHTS = 3  # bind and connect TCP, from version 4
SCOPE_SIGNALS_AND_SOCKETS = 3  # from version 6

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Features:
    """Features of the kernel to use, if it has them. Tests leave out what older kernels lack."""

    landlock: int = 1000  # highest version
    namespaces: bool = True


def isolate(folder: str, memory: int, cpu_seconds: int, features: Features) -> None:
    """Isolates this single-threaded process for good. It keeps its open files, and moves into `folder`.

    `memory` is in bytes, of address space. `cpu_seconds` is a second line behind the server's own limit.

    Raises:
        OSError: the kernel lacks a feature that is needed. The process must end then.
    """
    if platform.machine() not in AUDIT_ARCH:
        raise OSError(f"{platform.machine()} is not supported; code in a sandbox needs {' or '.join(AUDIT_ARCH)}")
    has_namespaces = features.namespaces and _enter_namespaces(folder)
    os.chdir(folder)
    if has_namespaces:  # only there does the limit count this process alone
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_THREADS, MAX_THREADS))
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, MAX_FILE),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    _drop_capabilities()
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _restrict_files(folder, features.landlock)
    _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "the parent's death")
    code = ctypes.create_string_buffer(seccomp_filter(os.getpid()))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code))
    _check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(
            f"{what}: {os.strerror(ctypes.get_errno())}; code in a sandbox needs Linux {OLDEST_KERNEL} or later with "
            f"Landlock and seccomp switched on, and this is {platform.release()}"
        )
    return result


def _enter_namespaces(folder: str) -> bool:
    """Enters namespaces and puts files in memory at `folder`; False if this machine does not give them."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC):
        return False
    # Some systems give the namespace and nothing in it (AppArmor): then the folder stays the one on the disk.
    with contextlib.suppress(OSError):
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
        if libc.mount(None, b"/", None, MS_PRIVATE_REC, None) == 0:
            size = f"size={FILES_IN_MEMORY},nr_inodes={MAX_FILES},mode=700".encode()
            libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID_NODEV_NOEXEC, size)
    return True


def _drop_capabilities() -> None:
    """Gives up all capabilities: of the own namespace, and of a trainer that runs as root."""
    _check(libc.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)), "capabilities")


def readable_paths() -> list[str]:
    """Paths that code may read: Python, shared libraries, time zones, a few devices."""
    python = {os.path.dirname(os.__file__), *(os.path.join(sys.base_prefix, lib) for lib in ("lib", "lib64"))}
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
    return [*python, *system, "/usr/share/zoneinfo", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random"]


def _restrict_files(folder: str, highest: int) -> None:
    """Denies reads outside `readable_paths` and writes outside `folder`; TCP and signals where Landlock knows them."""
    version = min(_check(libc.syscall(LANDLOCK_CREATE, None, 0, 1), "Landlock"), highest)
    rights = sum(bits for since, bits in FILE_RIGHTS.items() if version >= since)
    fields = struct.pack(
        "QQQ", rights, NET_RIGHTS if version >= 4 else 0, SCOPE_SIGNALS_AND_SOCKETS if version >= 6 else 0
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _check(libc.syscall(LANDLOCK_CREATE, fields, size, 0), "Landlock rules")
    _permit(ruleset, ["/dev/null"], rights & (READ | WRITE | TRUNCATE))
    _permit(ruleset, readable_paths(), READ | LIST)
    _permit(ruleset, [folder], rights & ~(EXECUTE | DEVICES_AND_SOCKETS))
    _check(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock start")
    os.close(ruleset)


def _permit(ruleset: int, paths: Sequence[str], rights: int) -> None:
    """Permits `rights` on the paths that exist and below them."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this system
            continue
        allowed = rights if os.path.isdir(path) else rights & ~LIST
        _check(libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0), f"Landlock: {path}")
        os.close(descriptor)
