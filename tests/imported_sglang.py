"""Imports SGLang for the CPU as a server does; loaded in the fork server of `forked_servers.py` alone."""

from __future__ import annotations

import importlib

from megarl.cpu import sglang_launch

sglang_launch.install()
for module in ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler", "sglang.srt.plugins"):
    importlib.import_module(module)
