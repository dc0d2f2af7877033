"""The GPU table of `docs/numbers.md`, filled from a report. A cell without a figure says "not measured"."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptance.report import shown

BEGIN, END = "<!-- gpu-table -->", "<!-- end of gpu-table -->"
NOT_MEASURED = "not measured"
NO_MACHINE = "No machine with a GPU has filled this table yet."


@dataclass(frozen=True)
class Figure:
    """A figure of the report, by its step, name and labels."""

    step: str
    name: str
    labels: Mapping[str, str | int]

    def of(self, report: Mapping[str, Any]) -> str:
        """The figure as text, of a step that passed."""
        for step in report.get("steps", ()):
            if step["name"] == self.step and step["status"] == "passed":
                for figure in step["figures"]:
                    if figure["figure"] == self.name and self.labels.items() <= figure.items():
                        return shown(figure["value"], figure["unit"])
        return NOT_MEASURED


@dataclass(frozen=True)
class Row:
    """A line of the table: figures in the order of its text."""

    what: str
    goal: str
    figures: Sequence[Figure]

    def line(self, report: Mapping[str, Any]) -> str:
        cells = [figure.of(report) for figure in self.figures]
        measured = NOT_MEASURED if set(cells) == {NOT_MEASURED} else ", ".join(cells)
        return f"| {self.what} | {self.goal} | {measured} |"


def _row_of_logprob(kind: str, direction: str, vocab: int) -> Row:
    labels = {"device": "cuda", "dtype": "bfloat16", "vocab": vocab, "kind": kind, "pass": direction}
    names = ("share of copy bandwidth", "over torch eager", "over torch.compile")
    what = f"{kind}, V = {vocab}, {direction}: share of copy bandwidth, over torch eager, over `torch.compile`"
    return Row(what, "85%", [Figure("benchmark logprob", name, labels) for name in names])


def _rows_of_transport(name: str) -> list[Row]:
    labels = {"device": "cuda", "transport": name, "path": "exact"}
    rows = (
        ("speed, seconds with digests", "", ("weights a second", "sync with digests")),
        ("time over a plain copy of its bytes", "1.5x", ("time over bound",)),
        ("digests' share of the plain copy's time", "10%", ("digests' share of the bound",)),
    )
    return [
        Row(f"weight sync by {name}: {what}", goal, [Figure(f"transport {name}", figure, labels) for figure in figures])
        for what, goal, figures in rows
    ]


def _row_of_run(layout: str) -> Row:
    names = ("rollout speed", "training speed", "log-prob difference of servers and trainer")
    figures = [Figure(f"grpo {layout}", name, {"layout": layout}) for name in names]
    return Row(f"GRPO {layout}: rollout, training, mean log-prob difference", "", figures)


def _row_of_update(model: str, goal: str) -> Row:
    names = ("MFU", "update speed", "layers")
    figures = [Figure(f"MFU {model}", name, {"device": "cuda"}) for name in names]
    return Row(f"update of {model}, bfloat16: MFU, speed, layers that ran", goal, figures)


def _row_of_head(what: str, goal: str, route: str) -> Row:
    names = ("time over materialising", "peak memory, share of the logits")
    return Row(what, goal, [Figure("benchmark linear_logprobs", n, {"device": "cuda", "route": route}) for n in names])


def _of(step: str, name: str, **labels: str | int) -> Figure:
    return Figure(step, name, labels)


ROWS = (
    *(
        _row_of_logprob(kind, direction, vocab)
        for vocab in (151936, 32000)
        for kind in ("log-prob", "log-prob+entropy")
        for direction in ("forward", "backward")
    ),
    Row(
        "log-prob, forward and backward, over Liger-Kernel",
        "",
        [_of("benchmark logprob", "forward and backward over Liger", dtype="bfloat16", vocab=151936)],
    ),
    Row(
        "`linear_token_loss`: time over the best public kernel",
        "1x",
        [_of("benchmark linear_logprobs", "time over the best public kernel", device="cuda", route="token_loss")],
    ),
    _row_of_head("`linear_token_loss`: time over all logits, share of their memory", "1.15x, 10%", "token_loss"),
    _row_of_head("Liger-Kernel's fused linear loss, the same two", "", "liger"),
    _row_of_head("Liger-Kernel's for tensor parallel ranks, on one", "", "liger_parallel"),
    _row_of_head("QuACK's chunked linear cross entropy", "", "quack"),
    _row_of_head("Cut Cross Entropy", "", "cut_cross_entropy"),
    Row(
        "packed GAE over a loop, policy loss over torch eager",
        "",
        [
            _of("benchmark gae", "gae over a loop", device="cuda"),
            _of("benchmark policy_loss", "policy loss over eager", device="cuda"),
        ],
    ),
    Row(
        "`te` layers from float32: log-probs, gradients (beside torch's in bfloat16)",
        "2x torch's",
        [
            _of("backend te", f"{what} from float32", backend=backend)
            for what in ("log-probs", "gradients")
            for backend in ("te", "torch")
        ],
    ),
    Row(
        "policy update over padded transformers, bfloat16",
        "2x",
        [_of("benchmark ppo_update", "ppo_update over padding", device="cuda", side="megarl")],
    ),
    _row_of_update("Qwen3-8B", "45%"),
    _row_of_update("Qwen3-30B-A3B", "30%"),
    *(row for name in ("nccl", "cuda_ipc", "gloo") for row in _rows_of_transport(name)),
    *(_row_of_run(layout) for layout in ("apart", "colocated")),
)


def table(report: Mapping[str, Any]) -> str:
    """The table for a report; {} gives the one that nobody has filled."""
    if report:
        packages = ("torch", "SGLang", "Megatron-core", "Transformer Engine")
        software = ", ".join(f"{name} {report['versions'][name]}" for name in packages if name in report["versions"])
        machine = f"Measured on {report['date']}: {report['machine']}; {software}."
    else:
        machine = NO_MACHINE
    lines = [machine, "", "| what | goal | measured |", "| --- | --- | --- |", *(row.line(report) for row in ROWS)]
    return "\n".join([BEGIN, "", *lines, "", END])


def write_table(report: Path, page: Path) -> None:
    """Replaces the table of a page by that of `report.json`.

    Raises:
        ValueError: the report is not of a GPU, or the page has no table.
    """
    facts = json.loads(report.read_text(encoding="utf-8"))
    if facts["device"] != "cuda":
        raise ValueError(f"{report} was measured on {facts['device']}; the GPU table takes figures of GPUs alone")
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{page} does not have one table between {BEGIN} and {END}")
    before, _, rest = text.partition(BEGIN)
    page.write_text(before + table(facts) + rest.partition(END)[2], encoding="utf-8")
