"""Prints the samples of an evaluation in the terminal.

python -m megarl.samples RUN [step=N] [show=all|solved|wrong] [find=TEXT] [count=N]

RUN is a run's folder (for its last evaluation, or that of step N) or a .jsonl file of samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from megarl.cli import exit_with
from megarl.knobs import UserError, visible

USAGE = "usage: python -m megarl.samples RUN [step=N] [show=all|solved|wrong] [find=TEXT] [count=N]"
OPTIONS = {"step": "", "show": "all", "find": "", "count": "10"}


def file_of(place: str, step: str) -> Path:
    """The file of samples. Raises UserError if there is none."""
    path = Path(place)
    if path.is_file():
        return path
    files = sorted((path / "evaluations").glob("step-*.jsonl"))
    if not files:
        raise UserError(f"{place} holds no evaluations; give a run's folder, such as runs/gsm8k_grpo/latest")
    if not step:
        return files[-1]
    matching = [file for file in files if step.isdecimal() and file.stem == f"step-{int(step):06d}"]
    if not matching:
        steps = ", ".join(str(int(file.stem.removeprefix("step-"))) for file in files)
        raise UserError(f"step={step} was not evaluated; there are {steps}")
    return matching[0]


def chosen(file: Path, show: str, find: str) -> Iterator[dict[str, Any]]:
    """Yields the samples that match."""
    if show not in ("all", "solved", "wrong"):
        raise UserError(f"show={show} is not one of all, solved, wrong")
    for line in file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        if show != "all" and sample["solved"] != (show == "solved"):
            continue
        if find.lower() in (sample["prompt"] + sample["completion"]).lower():
            yield sample


def main(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError(USAGE)
    options = dict(argument.partition("=")[::2] for argument in arguments[1:])
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise UserError(f"unknown option {unknown[0]}; {USAGE}")
    options = OPTIONS | options
    if not options["count"].isdecimal():
        raise UserError(f"count={options['count']} must be a number")
    file = file_of(arguments[0], options["step"])
    samples = list(chosen(file, options["show"], options["find"]))
    console = Console()
    for sample in samples[: int(options["count"])]:
        body = Text(visible(sample["prompt"]), style="dim")
        body.append("\n" + visible(sample["completion"]), style="green" if sample["solved"] else "red")
        versions = ", ".join(map(str, sample["versions"])) or "unknown"
        title = f"problem {sample['problem']}  reward {sample['reward']:g}  weights of version {versions}"
        console.print(Panel(body, title=Text(title), title_align="left"))
    console.print(f"{min(len(samples), int(options['count']))} of {len(samples)} samples in {file}")
    return 0


if __name__ == "__main__":
    exit_with(main, USAGE)
