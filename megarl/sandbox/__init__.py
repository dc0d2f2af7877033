"""Runs code that nobody has read, such as a model's output, in isolated processes.

The code has no network, cannot start a process, reads Python's own files and writes only into its own temporary folder.
Processor time, memory and output are limited. Needs Linux 5.13 or later with Landlock and seccomp, on x86_64 or
aarch64; elsewhere it refuses to run. docs/security.md has what code can reach, and what holds it.
"""

from __future__ import annotations

from megarl.sandbox.client import SandboxError, SandboxResult, check_statement, close, run_python
from megarl.sandbox.isolation import Features

__all__ = ["Features", "SandboxError", "SandboxResult", "check_statement", "close", "run_python"]
