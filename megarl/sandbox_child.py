"""Child process of `megarl.sandbox`: isolates itself, then runs the code from stdin. Standard library only.

Started as `python -I -S sandbox_child.py MEMORY_BYTES CPU_SECONDS CODE_BYTES`. The code comes first on stdin, then the
code's own input. Two kernel mechanisms isolate the process, and neither needs privileges:

- Landlock (https://docs.kernel.org/userspace-api/landlock.html) denies writes outside the working directory, and
  signals to other processes.
- A seccomp filter denies sockets, new processes and new programs.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

# Denied system calls by their number on (x86_64, aarch64); None if the architecture has no such call.
REFUSED = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "unshare": (272, 97),
    "mount": (165, 40),
    "setsid": (112, 157),
}
CLONE = (56, 220)
CLONE3 = 435
CLONE_THREAD = 0x10000
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
# Landlock's rights to write, remove, make, refer and truncate (bits 1, 4 to 14), by the ABI version that adds them.
WRITE_RIGHTS = {1: sum(1 << b for b in (1, *range(4, 13))), 2: 1 << 13, 3: 1 << 14}
SCOPE_SIGNAL_AND_SOCKETS = 3  # from ABI version 6

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    if result < 0:
        sys.exit(f"sandbox: {what}: {os.strerror(ctypes.get_errno())}; this kernel cannot isolate code")
    return result


def restrict_files(folder: str) -> None:
    """Denies writes outside `folder` and, from Landlock ABI version 6, signals to processes outside."""
    version = check(libc.syscall(LANDLOCK_CREATE, None, 0, 1), "Landlock")
    rights = sum(bits for since, bits in WRITE_RIGHTS.items() if version >= since)
    fields = struct.pack("QQQ", rights, 0, SCOPE_SIGNAL_AND_SOCKETS if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = check(libc.syscall(LANDLOCK_CREATE, fields, size, 0), "Landlock rules")
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    check(libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, folder_fd), 0), "Landlock folder")
    check(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock start")
    os.close(folder_fd)
    os.close(ruleset)


def refuse_calls() -> None:
    """Makes the calls in `REFUSED` fail with EPERM. Threads can still be created, processes cannot."""
    machine = platform.machine()
    column = list(AUDIT_ARCH).index(machine)
    load, equal, ret = 0x20, 0x15, 0x06
    allow, deny, no_call, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM is 1, ENOSYS 38
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (ret, 0, 0, kill), (load, 0, 0, 0)]
    program += [(0x35, 0, 1, X32_BIT), (ret, 0, 0, deny)]  # x32 calls have other numbers
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [(equal, 0, 1, number), (ret, 0, 0, deny)]
    program += [
        (equal, 0, 1, CLONE3),
        (ret, 0, 0, no_call),
    ]  # flags behind a pointer; on ENOSYS libc uses clone
    program += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (ret, 0, 0, deny)]
    program += [(ret, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    check(libc.prctl(22, 2, header, 0, 0), "seccomp")  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def main() -> None:
    memory, cpu = int(sys.argv[1]), int(sys.argv[2])
    if platform.machine() not in AUDIT_ARCH:
        sys.exit(f"sandbox: {platform.machine()} is not one of {', '.join(AUDIT_ARCH)}")
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "parent's death")  # PR_SET_PDEATHSIG
    code = sys.stdin.buffer.read(int(sys.argv[3])).decode()
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, 16 * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    check(libc.prctl(38, 1, 0, 0, 0), "no new privileges")  # PR_SET_NO_NEW_PRIVS
    restrict_files(os.getcwd())
    refuse_calls()
    program = compile(code, "<code>", "exec")
    sys.argv = ["<code>"]
    sys.path.insert(0, "")
    exec(program, {"__name__": "__main__"})  # isolated by now; running this code is the purpose of the process


if __name__ == "__main__":
    main()
