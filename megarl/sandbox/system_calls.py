"""The system calls of a sandboxed process: an allow-list, and its seccomp filter in BPF. Standard library only.

Every call that is not listed fails with EPERM, new ones of later kernels included. Calls that take a process id are
allowed on the process itself. Nothing listed creates a process, a socket, shared memory, a key, a lock or a mount, or
changes the mode, owner, time or attributes of a file: Landlock does not cover those on every kernel. No file is opened
past the kernel's cache: a program could wait for the disk for ever, and waiting is no sleep (see `activity`).
"""

from __future__ import annotations

import os
import platform
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h

# name: numbers on x86_64 and on aarch64; None if the architecture has no such call.
ALLOWED: dict[str, tuple[int, int | None]] = {
    # open files and pipes
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None), "pipe2": (293, 59), "ftruncate": (77, 46), "sendfile": (40, 71), "copy_file_range": (326, 285),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "eventfd2": (290, 19),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    # paths; Landlock decides which
    "creat": (85, None), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "stat": (4, None),
    "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43),
    "fstatfs": (138, 44), "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "symlink": (88, None), "symlinkat": (266, 36),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "brk": (12, 214),
    # time and randomness
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "nanosleep": (35, 101), "alarm": (37, None),
    "setitimer": (38, 103), "getitimer": (36, 102), "getrandom": (318, 278),
    # the process, its threads and handlers of its signals
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "getrusage": (98, 165),
    "getrlimit": (97, 163), "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168), "sched_yield": (24, 124),
    "futex": (202, 98), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
    "rseq": (334, 293), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132),
    "pause": (34, None), "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip

# name: numbers, the argument that is compared, its allowed values.
THREAD = (0x3D0F00, 0x7D0F00)  # pthread_create of glibc and musl; no process
FCNTL = (0, 1, 2, 3, 1030)  # duplicates and flags; no owner of signals, lock, lease or pipe size
SET_FLAGS = 4  # fcntl's command for flags of an open file, in the next argument
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, flags
SET_NAME = (15,)  # prctl: of a thread
ON_VALUE: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "clone": (56, 220, 0, THREAD),
    "fcntl": (72, 25, 1, FCNTL),
    "ioctl": (16, 29, 1, IOCTL),
    "prctl": (157, 167, 0, SET_NAME),
}
# Calls on a process: 0 or its own id. `kill(0)` would reach the group, which is the process alone (see `server`).
ON_ITSELF: dict[str, tuple[int, int]] = {
    "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "getpgid": (121, 155), "getsid": (124, 156),
    "sched_getaffinity": (204, 123),
}  # fmt: skip
# name: numbers, the argument with the flags. Landlock before version 3 lets a read-only open truncate.
OPEN: dict[str, tuple[int, int | None, int]] = {"open": (2, None, 1), "openat": (257, 56, 2)}
TRUNCATE, ACCESS_MODE = 0o1000, 0o3
PAST_THE_CACHE = os.O_DIRECT | os.O_DSYNC | os.O_SYNC
# Calls on a clock, the first argument. A negative one is the processor time of a process, see clock_getcpuclockid(3).
CLOCK: dict[str, tuple[int, int]] = {
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
}  # fmt: skip
NEGATIVE = 0x80000000
# Flags behind a pointer, which a filter cannot read. On ENOSYS, libc takes `clone` and `openat`.
ABSENT: dict[str, tuple[int, int]] = {"clone3": (435, 435), "openat2": (437, 437)}

# linux/bpf_common.h: LD|W|ABS, JMP|JEQ|K, JMP|JSET|K, ALU|AND|K, RET|K
_LOAD, _EQUAL, _ANY_OF, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # linux/seccomp.h
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments have 8 bytes, the low half first


def seccomp_filter(pid: int) -> bytes:
    """Assembles the filter for the process `pid` on this machine's architecture: one `struct sock_filter` a line."""
    machine = platform.machine()
    column = list(AUDIT_ARCH).index(machine)
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)
    lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for numbers in ALLOWED.values():
        lines += _on(numbers[column], [allow])
    on_value = {name: (numbers, place, values) for name, (*numbers, place, values) in ON_VALUE.items()}
    on_value |= {name: (list(numbers), 0, (0, pid)) for name, numbers in ON_ITSELF.items()}
    for name, (numbers_, place, values) in on_value.items():
        body = [_argument(place)]
        for value in values:
            body += [(_EQUAL, 0, 1, value), allow]
        if name == "fcntl":
            flags = [_argument(place + 1), (_ANY_OF, 0, 1, PAST_THE_CACHE), refuse, allow]
            body += [(_EQUAL, 0, len(flags), SET_FLAGS), *flags]
        lines += _on(numbers_[column], [*body, refuse])
    for *opens, place in OPEN.values():
        body = [_argument(place), (_ANY_OF, 0, 1, PAST_THE_CACHE), refuse, (_AND, 0, 0, TRUNCATE | ACCESS_MODE)]
        lines += _on(opens[column], [*body, (_EQUAL, 0, 1, TRUNCATE), refuse, allow])
    for clocks in CLOCK.values():
        lines += _on(clocks[column], [_argument(0), (_ANY_OF, 0, 1, NEGATIVE), refuse, allow])
    for numbers in ABSENT.values():
        lines += _on(numbers[column], [(_RETURN, 0, 0, _ENOSYS)])
    lines.append(refuse)
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _argument(place: int) -> tuple[int, int, int, int]:
    """Loads the low half of an argument."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * place)


def _on(number: int | None, body: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """`body` for the call `number`; other calls jump over it. Every path through `body` returns."""
    return [(_EQUAL, 0, len(body), number), *body] if number is not None else []
