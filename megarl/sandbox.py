"""Runs untrusted Python code, such as a model's output, in an isolated process.

The process has no network, cannot start another process, and writes only into its own temporary folder. Time, memory
and output are limited. It can read every file that its user can read. Needs Linux 5.13 or later with Landlock and
seccomp, on x86_64 or aarch64; elsewhere it refuses to run.
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
GRACE_S = 5.0  # for the process to end after SIGKILL


class SandboxError(RuntimeError):
    """Raised if the sandbox itself could not be set up. The code did not run."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a run. `status` is "ok" (exit code 0), "failed", "time" (limit) or "output" (limit)."""

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
    """Runs `code` as a script with `stdin` and waits at most `time_limit_s` seconds for its end.

    `memory_limit_mb` is in MiB. `output_limit` is in bytes, for stdout and stderr each.

    Raises:
        SandboxError: this machine cannot isolate code.
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
            input_bytes = source + stdin.encode(errors="surrogatepass")
            outcome, out, err = _communicate(process, input_bytes, time.monotonic() + time_limit_s, output_limit)
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
    if outcome != "exit":
        return SandboxResult(outcome, stdout, stderr)
    status = "time" if process.returncode == -signal.SIGXCPU else "ok" if process.returncode == 0 else "failed"
    return SandboxResult(status, stdout, stderr)


def _communicate(
    process: subprocess.Popen[bytes], input_bytes: bytes, deadline: float, limit: int
) -> tuple[str, bytes, bytes]:
    """Writes stdin and reads both outputs until the process ends or exceeds a limit.

    Returns:
        "exit", "time" (past `deadline`) or "output" (more than `limit` bytes), then stdout and stderr.
    """
    output = {"out": b"", "err": b""}
    unsent = memoryview(input_bytes)
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
                return "time", output["out"], output["err"]
            for key, _ in selector.select(remaining):
                done = False
                if key.data == "in":
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:65536]) :]
                        done = not unsent
                    except BrokenPipeError:
                        done = True
                else:
                    chunk = os.read(key.fd, 65536)
                    output[key.data] += chunk
                    done = not chunk
                    if len(output[key.data]) > limit:
                        return "output", output["out"][:limit], output["err"][:limit]
                if done:
                    selector.unregister(key.fileobj)
                    if key.data == "in":
                        assert process.stdin is not None
                        process.stdin.close()
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return "time", output["out"], output["err"]
    return "exit", output["out"], output["err"]
