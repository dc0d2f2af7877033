"""Runs Python code that nobody has read, such as a model's, in a process that can harm nothing.

The process has no network, starts no other process, writes only into its own temporary folder, and has limits on time,
memory and output. It can read files that its user can read. Linux with Landlock and seccomp (5.13 or later, x86_64 or
aarch64); elsewhere it refuses to run.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE_S = 5.0


class SandboxError(RuntimeError):
    """The sandbox itself could not be set up; the code did not run."""


@dataclass(frozen=True)
class SandboxResult:
    """How the code ended. `status` is "ok" (exit code 0), "failed", "time" (limit) or "output" (limit)."""

    status: str
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def run_python(
    code: str,
    stdin: str = "",
    *,
    time_limit_s: float = 5.0,
    memory_limit_mb: int = 512,
    output_limit: int = 65_536,
) -> SandboxResult:
    """Runs `code` as a script with `stdin` and waits for its end, at most `time_limit_s` seconds.

    Raises:
        SandboxError: this machine cannot shut code in.
    """
    source = code.encode(errors="surrogatepass")
    with tempfile.TemporaryDirectory(prefix="megarl-sandbox-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", "-S", str(CHILD), str(memory_limit_mb * 2**20), str(int(time_limit_s) + 1)]
        process = subprocess.Popen(
            [*command, str(len(source))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            given = source + stdin.encode(errors="surrogatepass")
            ended, out, err = _talk(process, given, time.monotonic() + time_limit_s, output_limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(GRACE_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()
    stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
    if stderr.startswith("sandbox: "):
        raise SandboxError(stderr.strip())
    if ended != "exit":
        return SandboxResult(ended, stdout, stderr)
    status = "time" if process.returncode == -signal.SIGXCPU else "ok" if process.returncode == 0 else "failed"
    return SandboxResult(status, stdout, stderr)


def _talk(process: subprocess.Popen[bytes], given: bytes, deadline: float, limit: int) -> tuple[str, bytes, bytes]:
    """Feeds and reads the process until its pipes close ("exit"), its time is up or it has said more than `limit`."""
    said = {"out": b"", "err": b""}
    left = memoryview(given)
    with selectors.DefaultSelector() as selector:
        for pipe, events, name in (
            (process.stdin, selectors.EVENT_WRITE, "in"),
            (process.stdout, selectors.EVENT_READ, "out"),
            (process.stderr, selectors.EVENT_READ, "err"),
        ):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, events, name)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return "time", said["out"], said["err"]
            for key, _ in selector.select(remaining):
                done = False
                if key.data == "in":
                    try:
                        left = left[os.write(key.fd, left[:65536]) :]
                        done = not left
                    except BrokenPipeError:
                        done = True
                else:
                    chunk = os.read(key.fd, 65536)
                    said[key.data] += chunk
                    done = not chunk
                    if len(said[key.data]) > limit:
                        return "output", said["out"][:limit], said["err"][:limit]
                if done:
                    selector.unregister(key.fileobj)
                    if key.data == "in":
                        assert process.stdin is not None
                        process.stdin.close()
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return "time", said["out"], said["err"]
    return "exit", said["out"], said["err"]
