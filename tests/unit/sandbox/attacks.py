"""Attacks on the machine around a sandbox, by kind. Each program exits with 0 only if its attack had its effect.

Before the first line stand PRELUDE and the victim: PID, a process of the same user; FILE, its private file; FOLDER, a
folder of its own with `empty` and `file` in it; PORT, where it listens on 127.0.0.1.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, mmap, os, platform, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def done(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def raw(x86, arm, *arguments):
    return done(libc.syscall(x86 if platform.machine() == "x86_64" else arm, *arguments))
"""

ATTACKS: dict[str, dict[str, str]] = {
    "files": {
        "write": "open(FILE, 'w').write('x')",
        "append": "open(FILE, 'a').write('x')",
        "update": "open(FILE, 'r+').write('x')",
        "truncate by a read-only open": "os.open(FILE, os.O_RDONLY | os.O_TRUNC)",
        "truncate by creat": "libc.creat(FILE.encode(), 0o600) >= 0 or 1 / 0",
        "truncate": "os.truncate(FILE, 0)",
        "remove": "os.remove(FOLDER + '/file')",
        "remove a folder": "os.rmdir(FOLDER + '/empty')",
        "move away": "os.rename(FOLDER + '/file', FOLDER + '/other')",
        "replace": "os.rename(FOLDER + '/file', FILE)",
        "exchange": "raw(316, 276, -100, FILE.encode(), -100, (FOLDER + '/file').encode(), 2)",
        "make": "open(FOLDER + '/new', 'x')",
        "make a folder": "os.mkdir(FOLDER + '/new')",
        "make a symbolic link": "os.symlink('/', FOLDER + '/new')",
        "make a hard link": "os.link(FILE, FOLDER + '/new')",
        "hard link into the own folder": "os.link(FILE, os.path.dirname(FILE) + '/new')",
        "make a named pipe": "os.mkfifo(FOLDER + '/new')",
        "make a socket file": "os.mknod(FOLDER + '/new', 0o140600)",
        "write through a link": "os.symlink(FILE, 'through'); open('through', 'w').write('x')",
        "write by a folder's descriptor": "os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open(FOLDER, os.O_PATH))",
        "write to a map": "m = mmap.mmap(os.open(FILE, os.O_RDWR), 0); m[0] = 120",
        "unnamed file": "os.open(FOLDER, os.O_TMPFILE | os.O_WRONLY)",
        "write by openat2": "raw(437, 437, -100, FILE.encode(), struct.pack('QQQ', os.O_WRONLY, 0, 0), 24)",
        "fill the temporary folder": "open(os.path.dirname(FOLDER) + '/new', 'x')",
    },
    "secrets": {
        "read a private file": "assert open(FILE).read()",
        "list a folder": "os.listdir(FOLDER)",
        "list the root": "os.listdir('/')",
        "read the users": "open('/etc/passwd').read()",
        "map a file": "mmap.mmap(os.open(FILE, os.O_RDONLY), 0, prot=mmap.PROT_READ)[:1]",
        "processor time of a process": "time.clock_gettime((~PID << 3) | 2)",
        "sleep until a process has worked": "t = struct.pack('qq', 0, 1); raw(230, 115, (~PID << 3) | 2, 1, t, None)",
        "cores of a process": "os.sched_getaffinity(PID)",
        "group of a process": "os.getpgid(PID)",
        "session of a process": "os.getsid(PID)",
        "watch a folder": "done(libc.inotify_add_watch(done(libc.inotify_init()), FOLDER.encode(), 0xFFF))",
        "what a page cache holds": "m = mmap.mmap(-1, 4096); b = ctypes.create_string_buffer(1); "
        "raw(27, 232, ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m))), ctypes.c_size_t(4096), b)",
    },
    "attributes": {
        "chmod": "os.chmod(FILE, 0o777)",
        "chmod of a folder": "os.chmod(FOLDER, 0o755)",
        "chmod of the own folder's parent's child": "os.chmod(FOLDER + '/empty', 0o700)",
        "fchmod": "os.fchmod(os.open(FOLDER, os.O_RDONLY), 0o755)",
        "fchmodat": "os.chmod('file', 0o777, dir_fd=os.open(FOLDER, os.O_PATH))",
        "fchmodat2": "raw(452, 452, -100, FILE.encode(), 0o777, 0)",
        "chown": "os.chown(FILE, -1, os.getgid())",
        "lchown": "os.lchown(FILE, os.getuid(), -1)",
        "fchown": "os.fchown(os.open(FOLDER, os.O_RDONLY), -1, os.getgid())",
        "utime": "os.utime(FILE, (0, 0))",
        "utime of a folder": "os.utime(FOLDER, (0, 0))",
        "futimens": "os.utime(os.open(FOLDER, os.O_RDONLY), (0, 0))",
        "setxattr": "os.setxattr(FILE, 'user.x', b'1')",
        "lsetxattr": "os.setxattr(FILE, 'user.x', b'1', follow_symlinks=False)",
        "removexattr": "os.removexattr(FILE, 'user.kept')",
        "flags of a file": "import fcntl; fcntl.ioctl(os.open(FOLDER, 0), 0x40086602, struct.pack('L', 0x40))",
    },
    "limits of others": {
        "open files": "resource.prlimit(PID, resource.RLIMIT_NOFILE, (3, 3))",
        "processor time": "resource.prlimit(PID, resource.RLIMIT_CPU, (1, 1))",
        "memory": "resource.prlimit(PID, resource.RLIMIT_AS, (1, 1))",
        "priority": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
        "priority of a group": "os.setpriority(os.PRIO_PGRP, os.getpgid(PID), 19)",
        "cores": "os.sched_setaffinity(PID, {min(os.sched_getaffinity(PID))})",
        "idle": "os.sched_setscheduler(PID, os.SCHED_IDLE, os.sched_param(0))",
        "batch": "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))",
        "attributes of the scheduler": "raw(314, 274, PID, struct.pack('IIQiIQQQ', 48, 5, 0, 0, 0, 0, 0, 0), 0)",
        "disk priority": "raw(251, 30, 1, PID, 3 << 13)",
        "first to die without memory": "open(f'/proc/{PID}/oom_score_adj', 'w').write('1000')",
        "what a dump holds": "open(f'/proc/{PID}/coredump_filter', 'w').write('0')",
    },
    "signals": {
        "kill": "os.kill(PID, signal.SIGTERM)",
        "stop": "os.kill(PID, signal.SIGSTOP); os.kill(PID, signal.SIGCONT)",
        "is it there": "os.kill(PID, 0)",
        "to all": "os.kill(-1, 0)",
        "to the parent": "os.kill(os.getppid(), 0)",
        "to a group": "os.killpg(os.getpgid(PID), signal.SIGTERM)",
        "to a thread": "raw(234, 131, PID, PID, signal.SIGTERM)",
        "to a thread of any group": "raw(200, 130, PID, signal.SIGTERM)",
        "by a pidfd": "signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGTERM)",
        "with a value": "raw(129, 138, PID, signal.SIGTERM, struct.pack('iiiiIQ100x', 15, 0, -1, 0, 0, 0))",
        "as the owner of a pipe": "import fcntl; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, PID); "
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
        "choice of that signal": "import fcntl; fcntl.fcntl(os.pipe()[0], 10, signal.SIGTERM)",
    },
    "shared memory": {
        "System V": "libc.shmctl(done(libc.shmget(0, 2**26, 0o1600)), 0, None)",
        "POSIX": "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=64); m.unlink()",
        "file in /dev/shm": "open(f'/dev/shm/megarl-attack-{PID}', 'w'); os.remove(f'/dev/shm/megarl-attack-{PID}')",
        "unnamed": "os.memfd_create('x')",
        "System V queue": "libc.msgctl(done(libc.msgget(0, 0o1600)), 0, None)",
        "System V semaphores": "libc.semctl(done(libc.semget(0, 1, 0o1600)), 0, 0, None)",
        "POSIX queue": "n = f'/megarl{PID}'.encode(); done(libc.mq_open(n, os.O_CREAT | os.O_RDWR, 0o600, None)); "
        "libc.mq_unlink(n)",
        "POSIX semaphore": "import multiprocessing as m; m.Semaphore()",
        "pinned memory": "done(libc.mlock(ctypes.create_string_buffer(4096), 4096))",
        "larger pipes": "import fcntl; fcntl.fcntl(os.pipe()[0], 1031, 2**19)",
    },
    "keyrings": {
        "add a key": "raw(248, 217, b'user', b'megarl', b'x', 1, -2)",
        "own session's keyring": "raw(250, 219, 0, -3, 1)",
        "join a session": "raw(250, 219, 1, None)",
        "read the user's keyring": "raw(250, 219, 0, -4, 1)",
    },
    "network": {
        "connect": "socket.create_connection(('127.0.0.1', PORT), 5)",
        "HTTP": "import urllib.request as u\ntry: u.urlopen(f'http://127.0.0.1:{PORT}/', timeout=0.3)\n"
        "except TimeoutError: pass  # it is connected, and nothing answers",
        "listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
        "TCP over IPv6": "socket.socket(socket.AF_INET6)",
        "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
        "Unix": "socket.socket(socket.AF_UNIX)",
        "Unix, abstract": "socket.socket(socket.AF_UNIX).bind(f'\\0megarl{PID}')",
        "a pair": "socket.socketpair()",
        "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
        "kernel's crypto": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    },
    "processes": {
        "fork": "os.fork() or os._exit(0)",
        "vfork": "raw(58, 99, 0) or os._exit(0) if platform.machine() == 'x86_64' else os.fork() or os._exit(0)",
        "clone": "raw(56, 220, int(signal.SIGCHLD), 0, 0, 0, 0) or os._exit(0)",
        "clone into a namespace": "raw(56, 220, 0x10000011, 0, 0, 0, 0) or os._exit(0)",
        "clone3": "raw(435, 435, struct.pack('8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64) or os._exit(0)",
        "spawn": "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)[1] and 1 / 0",
        "subprocess": "subprocess.run(['true'], check=True)",
        "shell": "os.system('true') and 1 / 0",
        "exec": "os.execv('/bin/true', ['true'])",
        "exec by a descriptor": "os.execve(os.open('/bin/true', os.O_PATH), ['true'], {})",
        "exec of an own file": "open('x', 'w').write('#!/bin/true'); os.chmod('x', 0o700); os.execv('./x', ['x'])",
        "multiprocessing": "import multiprocessing as m; p = m.get_context('fork').Process(target=int); p.start()",
        "terminal": "import pty; pty.openpty()",
        "session": "os.fork() and os._exit(0); os.setsid()",
    },
    "debugging": {
        "attach": "raw(101, 117, 16, PID, 0, 0); os.waitpid(PID, 0); raw(101, 117, 17, PID, 0, 0)",
        "seize": "raw(101, 117, 0x4206, PID, 0, 0)",
        "be traced": "raw(101, 117, 0, 0, 0, 0)",
        "descriptors of others": "raw(438, 438, os.pidfd_open(PID), 0, 0)",
        "a handle on a process": "os.pidfd_open(PID)",
        "compare processes": "raw(312, 272, os.getpid(), PID, 1, 0, 0)",
        "robust locks of others": "raw(274, 100, PID, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8))",
        "read memory of others": "b = ctypes.create_string_buffer(8); "
        "done(libc.process_vm_readv(PID, struct.pack('PL', ctypes.addressof(b), 8), 1, struct.pack('PL', ADDRESS, 8), "
        "1, 0)); b.raw == b'original' or 1 / 0",
        "write memory of others": "b = ctypes.create_string_buffer(b'hijacked'); "
        "done(libc.process_vm_writev(PID, struct.pack('PL', ctypes.addressof(b), 8), 1, struct.pack('PL', ADDRESS, 8), "
        "1, 0))",
    },
    "/proc": {
        "memory": "open(f'/proc/{PID}/mem', 'rb').seek(ADDRESS)",
        "environment": "assert open(f'/proc/{PID}/environ').read()",
        "environment of the parent": "open(f'/proc/{os.getppid()}/environ').read()",
        "environment of itself": "open('/proc/self/environ').read()",
        "command line": "assert open(f'/proc/{PID}/cmdline').read()",
        "descriptors": "os.listdir(f'/proc/{PID}/fd')",
        "files behind descriptors": "os.readlink(f'/proc/{PID}/cwd')",
        "open a descriptor": "open(f'/proc/{PID}/fd/0')",
        "root": "os.listdir(f'/proc/{PID}/root')",
        "all processes": "os.listdir('/proc')",
        "first to die": "open('/proc/self/oom_score_adj', 'w').write('500')",
        "mounts": "open('/proc/self/mountinfo').read()",
        "devices": "os.listdir('/dev')",
        "network of the machine": "open('/proc/net/tcp').read()",
    },
    "kernel": {
        "own user namespace": "done(libc.unshare(0x10000000))",
        "a process's namespace": "done(libc.setns(os.open(f'/proc/{PID}/ns/user', os.O_RDONLY), 0))",
        "asynchronous I/O": "raw(425, 425, 8, ctypes.create_string_buffer(120))",
        "older asynchronous I/O": "raw(206, 0, 8, ctypes.create_string_buffer(8))",
        "page faults": "raw(323, 282, 1)",
        "secret memory": "raw(447, 447, 0)",
        "execution domain": "raw(135, 92, 0x0040000)",
        "handles of files": "raw(303, 264, -100, FILE.encode(), struct.pack('Ii', 128, 0) + bytes(128), bytes(8), 0)",
        "another filter": "done(libc.prctl(38, 1, 0, 0, 0)); c = ctypes.create_string_buffer("
        "struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)); raw(317, 277, 1, 0, struct.pack('HxxxxxxP', 1, "
        "ctypes.addressof(c)))",
        "a timer for a thread": "raw(222, 107, 0, None, ctypes.create_string_buffer(8))",
        "flush all disks": "raw(162, 81)",
        "wait for the disk at each write": "os.write(os.open('x', os.O_CREAT | os.O_WRONLY | os.O_DSYNC), b'x')",
        "write past the cache": "os.open('x', os.O_CREAT | os.O_WRONLY | os.O_DIRECT)",
        "write past the cache from now on": "import fcntl; "
        "fcntl.fcntl(os.open('x', os.O_CREAT | os.O_WRONLY), fcntl.F_SETFL, os.O_DIRECT)",
        "lock a file of Python": "import fcntl; fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
        "lease on a file": "open('x', 'w'); import fcntl; fcntl.fcntl(os.open('x', os.O_RDONLY), 1024, 0)",
    },
    "memory": {
        "array": "bytearray(2**30)",
        "map": "mmap.mmap(-1, 4 * 2**30)",
        "large file": "open('x', 'wb').write(bytes(2**26))",
        "sparse file": "os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 2**26)",
        "more open files": "[os.dup(0) for _ in range(100)]",
        "higher limit of memory": "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); bytearray(2**30)",
        "stacks of threads": "threading.stack_size(2**28)\nfor _ in range(8): "
        "threading.Thread(target=time.sleep, args=(0.5,)).start()",
    },
}

# Effects that some kernels, file systems or settings refuse to everyone: without them the attack proves nothing there.
DEPENDS_ON_THE_MACHINE = {
    "fchmodat2", "flags of a file", "setxattr", "lsetxattr", "removexattr", "larger pipes", "pinned memory",
    "first to die without memory", "kernel's crypto", "TCP over IPv6", "own user namespace", "clone into a namespace",
    "vfork", "a process's namespace",
    "asynchronous I/O", "older asynchronous I/O", "page faults", "secret memory", "attach", "seize",
    "read memory of others", "write memory of others", "descriptors of others", "compare processes", "memory",
    "robust locks of others", "handles of files", "POSIX queue", "add a key", "own session's keyring",
    "join a session", "read the user's keyring", "terminal", "exchange", "unnamed file",
    "write past the cache", "write past the cache from now on",
}  # fmt: skip
