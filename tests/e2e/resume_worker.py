"""A process that imports everything once and runs `megarl.train` in children that it forks: a run starts in a moment.

Reads lines of JSON `{"arguments", "output", "die"}` from stdin and answers each with the child's pid. `die` names a
point of a checkpoint's writing and how often it is passed before the child kills itself there; null lets it live.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from megarl import cli, train
from megarl.actor import supervised  # noqa: F401 (Megatron is loaded once)
from megarl.actor.checkpoint import engine_state
from megarl.trainer import sft  # noqa: F401
from megarl.trainer.checkpoints import manifest, saver

POINTS: dict[str, tuple[Any, str]] = {
    "a rank's file is to be written": (engine_state, "save_file"),
    "files are to be hashed": (manifest, "describe"),
    "the manifest is to be written": (manifest, "seal"),
    "the folder is to be renamed": (manifest, "rename"),
    "an old checkpoint is to be removed": (saver.Saver, "_remove"),
}


def die_at(point: str, passes: int) -> None:
    """Kills this process when it comes to the point for the `passes`th time, as SIGKILL from outside would."""
    module, name = POINTS[point]
    real: Callable[..., Any] = getattr(module, name)
    left = [passes]

    def counted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(module, name, counted)


def run(order: dict[str, Any]) -> None:
    """Becomes the command, and never returns."""
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if order["die"] is not None:
        die_at(*order["die"])
    sys.argv = ["megarl.train", *order["arguments"]]
    code = 1
    try:
        cli.run_command(train.main)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    assert threading.active_count() == 1, "a process with threads is not forked"
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(order)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
