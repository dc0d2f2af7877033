"""Writes the HTML report of a run: python -m megarl.report RUN, such as runs/gsm8k_grpo/latest."""

from __future__ import annotations

from pathlib import Path

from megarl.cli import exit_with
from megarl.knobs import UserError
from megarl.launcher.status import states
from megarl.observe.page import write_page
from megarl.observe.run_folder import RunFolder

USAGE = "usage: python -m megarl.report RUN, the folder of a run such as runs/gsm8k_grpo/latest"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or "=" in arguments[0]:
        raise UserError(USAGE)
    folder = Path(arguments[0])
    print(f"report    {write_page(folder, states(RunFolder(folder.resolve()), ask='none'))}")
    return 0


if __name__ == "__main__":
    exit_with(main, USAGE)
