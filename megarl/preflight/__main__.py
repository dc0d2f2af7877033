"""Runs `python -m megarl.preflight`."""

from megarl import cli
from megarl.preflight.report import USAGE, command

if __name__ == "__main__":
    cli.exit_with(command, USAGE)
