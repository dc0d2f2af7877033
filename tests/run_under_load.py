"""Runs tests beside busy processes, several times in a row: python tests/run_under_load.py [--rounds N] [PYTEST ...]

Without arguments for pytest a round is `make test`. A limit that a busy machine passes fails here. The first failed
round ends it, with its exit code.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

BUSY = "while True: pass"


def rounds_of(command: list[str], rounds: int, busy: int) -> int:
    """Runs the command `rounds` times beside `busy` computing processes. Returns its first exit code that is not 0."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        for number in range(1, rounds + 1):
            started = time.monotonic()
            code = subprocess.run(command, check=False).returncode
            ended = [loop.pid for loop in loops if loop.poll() is not None]
            print(f"round {number} of {rounds}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
            if ended:
                print(f"{len(ended)} of {busy} busy processes ended, so this was less load; run it again", flush=True)
                return 1
            if code:
                return code
        return 0
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside the tests")
    parser.add_argument("--workers", type=int, default=3, help="processes that share the tests")
    given, tests = parser.parse_known_args()
    suite = ["-n", str(given.workers), "--no-loadscope-reorder", "-m", "not long"]
    some = [sys.executable, "-m", "pytest", *suite, *tests]
    return rounds_of(some if tests else ["make", "test", "ARGS=", f"WORKERS={given.workers}"], given.rounds, given.busy)


if __name__ == "__main__":
    sys.exit(main())
