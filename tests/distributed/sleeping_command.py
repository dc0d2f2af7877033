"""A command of two ranks that write their process ids to a file and sleep; for `test_warm_ranks.py`."""

from __future__ import annotations

import os
import sys
import time

from megarl.launcher import local

if __name__ == "__main__":
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\n")
    if len(sys.argv) == 2:
        for rank in range(2):
            command = [sys.executable, "-m", "tests.distributed.sleeping_command", sys.argv[1], str(rank)]
            local.subprocess.Popen(command, stdout=None, stderr=None, start_new_session=True)
    time.sleep(600)
