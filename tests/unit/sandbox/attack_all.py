"""Runs every attack in the sandbox, on several sets of kernel features, and once without one. Prints JSON.

Started by `test_attacks.py` as a user without privileges. Victims are made for the purpose. A line of the result names
the attack, what it was run with, whether it succeeded by its own account, and what it changed about its victim.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.sandbox import Features, close, run_python
from tests.unit.sandbox.attacks import ATTACKS, PRELUDE

KERNELS = {
    "this kernel": Features(),
    "this kernel without namespaces": Features(namespaces=False),
    "Linux 5.13": Features(landlock=1, namespaces=False),  # Landlock's first version
}
VICTIM = (
    "import ctypes, time; b = ctypes.create_string_buffer(b'original'); print(ctypes.addressof(b), flush=True)\n"
    "while True: print(b.raw.hex(), flush=True) if input() else None"
)


@dataclass
class Victim:
    """A process of this user, its files and its port. `state()` is all that an attack might change."""

    process: subprocess.Popen[str]
    file: Path
    folder: Path
    listener: socket.socket
    address: int

    def prelude(self) -> str:
        values = {
            "PID": self.process.pid,
            "FILE": str(self.file),
            "FOLDER": str(self.folder),
            "PORT": self.listener.getsockname()[1],
            "ADDRESS": self.address,
        }
        return PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in values.items())

    def state(self) -> dict[str, Any]:
        """What an attack might change. Reading it changes nothing."""
        pid = self.process.pid
        if self.process.poll() is not None:
            return {"ended": self.process.returncode}
        tree = {}
        for path in sorted([self.file, self.folder, *self.folder.iterdir(), self.folder.parent]):
            fact = path.lstat()
            names = (fact.st_mode, fact.st_uid, fact.st_gid, fact.st_size, fact.st_mtime, fact.st_nlink)
            tree[path.name] = (*names, sorted(os.listxattr(path)) if path.is_file() else sorted(os.listdir(path)))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print("state", file=self.process.stdin, flush=True)
        return {
            "tree": tree,
            "text": self.file.read_text(),
            "memory": self.process.stdout.readline(),
            "limits": [resource.prlimit(pid, n) for n in range(16)],
            "priority": os.getpriority(os.PRIO_PROCESS, pid),
            "scheduler": os.sched_getscheduler(pid),
            "cores": sorted(os.sched_getaffinity(pid)),
            "oom": Path(f"/proc/{pid}/oom_score_adj").read_text(),
            "shared memory": Path("/proc/sysvipc/shm").read_text().count("\n"),
        }


@contextlib.contextmanager
def victim() -> Iterator[Victim]:
    top = Path(tempfile.mkdtemp(prefix="megarl-victim-"))
    folder = top / "folder"
    (folder / "empty").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder / "file").write_text("other")
    file = top / "secret"
    file.write_text("secret")
    file.chmod(0o600)
    with contextlib.suppress(OSError):  # no attributes on this file system
        os.setxattr(file, "user.kept", b"1")
    listener = socket.create_server(("127.0.0.1", 0))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", VICTIM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"SECRET": "x"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield Victim(process, file, folder, listener, int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()
        listener.close()
        shutil.rmtree(top)


def without_sandbox(code: str) -> int:
    """The exit code of an attack in an ordinary process of this user."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-S", "-c", code]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.run(command, cwd=folder, timeout=900, check=False, start_new_session=True, **quiet).returncode  # type: ignore[call-overload,no-any-return]


def main() -> None:
    lines = []
    attacks = [(kind, name, code) for kind, named in ATTACKS.items() for name, code in named.items()]
    with victim() as target:
        before = target.state()
        for kernel, features in KERNELS.items():
            for kind, name, code in attacks:
                result = run_python(target.prelude() + code, features=features, time_limit_s=20.0, wall_limit_s=600.0)
                after = target.state()
                changed = sorted(key for key in after if after[key] != before.get(key))
                before = after  # a change is charged to one attack
                line = {"kernel": kernel, "kind": kind, "name": name, "status": result.status, "changed": changed}
                lines.append({**line, "last": result.stderr.strip().splitlines()[-1:]})
    close()
    for kind, name, code in attacks:
        with victim() as target:
            status = without_sandbox(target.prelude() + code)
        lines.append({"kernel": "", "kind": kind, "name": name, "status": status, "changed": [], "last": []})
    privileges = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff")]
    print(json.dumps({"uid": os.getuid(), "privileges": privileges, "lines": lines}))


if __name__ == "__main__":
    main()
