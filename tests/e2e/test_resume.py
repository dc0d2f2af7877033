"""A run that is killed again and again, resumed each time, ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.actor.checkpoint.stored_state import StoredState
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from tests import rows
from tests.e2e.resume_worker import POINTS
from tests.e2e.test_main_job import DEADLINE_S, Command

pytestmark = rows.marks()
STEPS = 90 if rows.wants_all() else 30
ARGUMENTS = [
    "+experiment=gsm8k_sft", "train_dataset.batch_size=4", f"total_train_steps={STEPS}", "saver.every_steps=3",
    "evaluator.every_steps=0", "actor.optimizer.lr_decay_style=linear", "actor.optimizer.warmup_steps=5",
]  # fmt: skip
ADAPTERS = ["actor.lora.rank=4", "actor.lora.dropout=0.2", "actor.init=checkpoint", "total_train_steps=12"]
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Runs:
    """Runs `megarl.train` in one folder, one run at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.e2e.resume_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, name: str, die: tuple[str, int] | None = None, options: Sequence[str] = (), **resume: Path) -> int:
        """Starts a run below `name`, with options in place of or beside `ARGUMENTS`, and returns its pid."""
        (self.root / name).mkdir(exist_ok=True)
        replaced = {option.partition("=")[0] for option in options}
        kept = [argument for argument in ARGUMENTS if argument.partition("=")[0] not in replaced]
        arguments = [*kept, *options, f"run_root={self.root / name}", *(f"resume={path}" for path in resume.values())]
        order = {"arguments": arguments, "output": str(self.output(name)), "die": die}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """The exit code of the run; negative is a signal's number."""
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def output(self, name: str) -> Path:
        return self.root / f"{name}.txt"

    def folder(self, name: str) -> RunFolder:
        return RunFolder((self.root / name / "gsm8k_sft" / "latest").resolve())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> RunFolder:
    runs.start("undisturbed")
    assert runs.wait() == 0, runs.output("undisturbed").read_text()[-3000:]
    return runs.folder("undisturbed")


def kill_later(pid: int, number: int, output: Path, steps: int, delay_s: float) -> None:
    """Sends a signal once the run that writes to `output` has shown so many steps more, and a moment longer."""
    start = output.stat().st_size if output.exists() else 0
    deadline = time.monotonic() + DEADLINE_S
    while not output.exists() or output.read_bytes()[start:].count(b"\nstep ") < steps:
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.002)
    time.sleep(delay_s)
    os.kill(pid, number)


def assert_same_end(one: RunFolder, other: RunFolder, steps: int = STEPS, exported: str = "model.safetensors") -> None:
    """Weights, Adam's moments, data position and every step's loss are the same bits."""
    last = [run.checkpoints / f"step_{steps:06d}" for run in (one, other)]
    states = [StoredState(path / "actor") for path in last]
    assert states[0].facts == states[1].facts
    for name, shape in states[0].shapes.items():
        for kind in KINDS:
            a, b = (state.read(kind, name, (0,) * len(shape), shape) for state in states)
            assert torch.equal(a, b), f"{kind} of {name}"
    parts = [json.loads((path / "trainer.json").read_text())["parts"] for path in last]
    assert parts[0] == parts[1]
    written = [load_file(run.path / "hf" / exported) for run in (one, other)]
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])
    losses = [[(row["step"], row["train/loss"]) for row in read_metrics(run.metrics)] for run in (one, other)]
    assert losses[0] == losses[1]


def test_a_run_killed_at_many_moments_ends_with_the_bits_of_an_undisturbed_one(
    runs: Runs, undisturbed: RunFolder
) -> None:
    draw = random.Random(20)
    moments: list[Any] = [(point, draw.randint(1, 2)) for point in POINTS]
    moments += [(draw.choice([signal.SIGKILL, signal.SIGTERM]), draw.randint(1, 5)) for _ in range(5)]
    draw.shuffle(moments)
    moments = rows.every(3, moments)
    runs.start("killed", die=("the manifest is to be written", 1))  # before there is a checkpoint: begins anew
    assert runs.wait() == -signal.SIGKILL
    resume: dict[str, Path] = {}
    for where, count in moments:
        if isinstance(where, str):
            runs.start("killed", die=(where, count), **resume)
            assert runs.wait() == -signal.SIGKILL, where
        else:
            pid = runs.start("killed", **resume)
            kill_later(pid, where, runs.output("killed"), count, draw.uniform(0, 0.05))
            code = runs.wait()
            assert code == (-signal.SIGKILL if where == signal.SIGKILL else 0), runs.output("killed").read_text()[
                -3000:
            ]
        folder = runs.folder("killed")
        if any(not p.suffix for p in folder.checkpoints.iterdir()):
            resume = {"resume": folder.path}
    runs.start("killed", **resume)
    assert runs.wait() == 0, runs.output("killed").read_text()[-3000:]
    assert_same_end(undisturbed, runs.folder("killed"))
    assert not [p.name for p in runs.folder("killed").checkpoints.iterdir() if p.suffix], "left by a killed run"


@pytest.mark.long
def test_adapters_with_dropout_that_are_killed_and_resumed_end_with_the_same_bits(
    runs: Runs, undisturbed: RunFolder
) -> None:
    options = [*ADAPTERS, f"actor.path={undisturbed.path / 'hf'}"]
    runs.start("adapters", options=options)
    assert runs.wait() == 0, runs.output("adapters").read_text()[-3000:]
    runs.start("adapters_killed", die=("files are to be hashed", 3), options=options)
    assert runs.wait() == -signal.SIGKILL
    runs.start("adapters_killed", options=options, resume=runs.folder("adapters_killed").path)
    assert runs.wait() == 0, runs.output("adapters_killed").read_text()[-3000:]
    ends = runs.folder("adapters"), runs.folder("adapters_killed")
    assert_same_end(*ends, steps=12, exported="adapter_model.safetensors")


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    runs: Runs, undisturbed: RunFolder
) -> None:
    runs.start("damaged", die=("files are to be hashed", 4))
    assert runs.wait() == -signal.SIGKILL
    run = runs.folder("damaged")
    newest = max(p for p in run.checkpoints.iterdir() if not p.suffix)
    path = newest / "actor" / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 8
    path.write_bytes(content)
    runs.start("damaged", resume=run.path)
    assert runs.wait() == 0
    text = runs.output("damaged").read_text()
    assert f"{newest} is damaged (actor/rank_00000.safetensors is not what was written" in text
    assert_same_end(undisturbed, run)


@pytest.mark.long
def test_a_run_goes_on_with_more_ranks_on_another_layout(undisturbed: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(shutil.copytree(undisturbed.path, tmp_path / "run"))
    arguments = [a for a in ARGUMENTS if not a.startswith("total_train_steps")]
    command = Command(
        tmp_path, *arguments, f"total_train_steps={STEPS + 2}", f"resume={copy.path}", "parallel.dp_size=2"
    )
    assert command.wait() == 0, command.output.read_text()[-3000:]
    text = command.output.read_text()
    assert "ranks 1 are new: their random generators are seeded from rank 0's" in text
    last = copy.checkpoints / f"step_{STEPS + 2:06d}"
    assert len(list((last / "actor").glob("rank_*.safetensors"))) == 2
    assert len(list((last / "generators").iterdir())) == 2
    losses = {int(row["step"]): row["train/loss"] for row in read_metrics(copy.metrics)}
    assert list(losses) == list(range(1, STEPS + 3))
    assert losses[STEPS + 2] < 0.6 * losses[1]
