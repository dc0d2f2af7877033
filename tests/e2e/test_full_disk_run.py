"""A disk that fills up under `megarl.train` ends it with one line, and the run goes on once there is space again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.observe.run_folder import RunFolder
from megarl.trainer.checkpoints import manifest
from tests.e2e.test_main_job import DEADLINE_S, steps_in

ALONE = ["unshare", "--mount", "--propagation=private"]  # mounts of the process and its children alone
AS_USER = [*ALONE, "--user", "--map-root-user"]
STEPS = 400  # the disk is full long before
SFT = ["+experiment=gsm8k_sft", "train_dataset.batch_size=4", "saver.export_hf=false", "evaluator.every_steps=0"]


class Disk:
    """A file system in memory, of `mib` MiB, which ends with its process."""

    def __init__(self, folder: Path, mib: int, output: Path) -> None:
        mount = f"mount -t tmpfs -o size={mib}m none {folder} && echo mounted && exec sleep infinity"
        self.user = os.geteuid() != 0
        command = [*(AS_USER if self.user else ALONE), "sh", "-c", mount]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()
        self.inside = folder
        self.folder = Path(f"/proc/{self.process.pid}/root{folder}")  # as seen from outside
        self.output = output
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Starts a command that sees the disk. What it says goes to `output`."""
        join = ["nsenter", f"--target={self.process.pid}", "--mount", *(["--user"] if self.user else [])]
        with self.output.open("wb") as file:
            self.started.append(subprocess.Popen([*join, *command], stdout=file, stderr=subprocess.STDOUT))
        return self.started[-1]

    def fill(self) -> None:
        """Leaves not a byte."""
        with (self.folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def grow(self, mib: int) -> None:
        assert self.run("mount", "-o", f"remount,size={mib}m", str(self.inside)).wait(DEADLINE_S) == 0

    def close(self) -> None:
        for process in (*self.started, self.process):
            process.kill()
            process.wait(DEADLINE_S)


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    disk = Disk(tmp_path, request.param, tmp_path_factory.mktemp("said") / "output.txt")
    try:
        if disk.said != "mounted":
            pytest.skip(f"this machine mounts no file system in memory: {disk.said}")
        yield disk
    finally:
        disk.close()


@pytest.mark.parametrize(
    ("disk", "filled"),
    [(4, False), (64, True)],
    ids=["a checkpoint too many", "not a byte left"],
    indirect=["disk"],
)
def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_it_goes_on_later(disk: Disk, filled: bool) -> None:
    train = [sys.executable, "-m", "megarl.train", *SFT, f"run_root={disk.inside}", "saver.every_steps=1"]
    run = disk.run(*train, f"total_train_steps={STEPS}")
    newest = disk.folder / "gsm8k_sft" / "latest"
    deadline = time.monotonic() + DEADLINE_S
    while not manifest.step_folders(newest / "checkpoints"):
        assert run.poll() is None, disk.output.read_text()[-3000:]
        assert time.monotonic() < deadline, disk.output.read_text()[-3000:]
        time.sleep(0.05)
    if filled:
        disk.fill()
    assert run.wait(DEADLINE_S) == 1
    said = disk.output.read_text()
    last = said.splitlines()[-1]
    assert last.startswith("megarl: "), said[-3000:]
    assert "No space left on device" in last
    assert "free space there or set run_root to another disk, then go on with resume=RUN_FOLDER" in last
    assert "Traceback" not in said
    folders = manifest.step_folders(newest / "checkpoints")
    assert folders
    assert filled or not list(newest.glob("checkpoints/*.writing"))
    done = int(folders[0].name.removeprefix("step_"))
    disk.grow(128)
    run = disk.run(*train, f"total_train_steps={done + 2}", f"resume={disk.inside}/gsm8k_sft/latest")
    assert run.wait(DEADLINE_S) == 0, disk.output.read_text()[-3000:]
    assert steps_in(RunFolder(newest)) == list(range(1, done + 3))
    assert not list(newest.glob("checkpoints/*.writing"))  # nor what another write's error left there
