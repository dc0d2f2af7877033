"""Runs a command as a user without privileges: as `nobody` where the tests run as root, else as who they are."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534


def unprivileged(command: Sequence[str], readable: Sequence[Path]) -> list[str]:
    """The command line that drops to nobody and then runs `command`.

    Nobody cannot enter a folder such as /root, where Python or `readable` may lie. There they are mounted again, in a
    mount namespace of the command alone. That takes root's right to mount, which some containers lack.
    """
    if os.getuid() != 0:
        return list(command)
    paths = [Path(sys.base_prefix).resolve(), Path(sys.executable).parents[1], *readable]
    closed = {path: top for path in paths if (top := _closed_parent(path)) is not None}
    lines = ["set -eu"]
    lines += [f"exec {20 + i}< {shlex.quote(str(path))}" for i, path in enumerate(closed)]
    lines += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(top))}" for top in sorted(set(closed.values()))]
    for i, path in enumerate(closed):
        place = shlex.quote(str(path))
        lines += [f"mkdir -p {place}", f"mount --no-canonicalize --bind /proc/self/fd/{20 + i} {place}"]
    drop = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all --no-new-privs"
    lines.append(f"exec {drop} -- {shlex.join(command)}")
    return [*(["unshare", "--mount", "--propagation", "private"] if closed else []), "bash", "-c", "\n".join(lines)]


def _closed_parent(path: Path) -> Path | None:
    """The topmost folder on the way to `path` that others cannot enter."""
    return next((top for top in [*reversed(path.parents), path] if not top.stat().st_mode & 0o001), None)
