"""Two commands in one run folder: the later one has it, and the earlier one ends before it writes more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config import Config, SaverConfig
from megarl.knobs import UserError
from megarl.observe.run_folder import RunFolder, RunTakenError
from megarl.trainer import run_owner
from megarl.trainer.checkpoints.saver import CheckpointError, Saver
from megarl.trainer.run_owner import RunOwner, check_ended
from megarl.trainer.saved_config import make_adapter_folder, make_folder
from tests.exit_codes import exit_code


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = make_folder(Config(run_root=str(tmp_path)), "job")
    run.make(again=True)
    return run


@pytest.fixture
def other(folder: RunFolder) -> Any:
    """A process that runs, and owns the folder."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def owned_by(folder: RunFolder, process: subprocess.Popen[Any], **facts: Any) -> None:
    RunOwner(folder)
    path = folder.path / run_owner.OWNER
    theirs = {"pid": process.pid, "process_started": psutil.Process(process.pid).create_time(), **facts}
    path.write_text(json.dumps({**json.loads(path.read_text()), **theirs}))


def test_the_last_command_that_opened_a_folder_has_it(folder: RunFolder) -> None:
    first = RunOwner(folder)
    first.check()
    second = RunOwner(folder)
    second.check()
    with pytest.raises(RunTakenError, match=rf"was opened by process {os.getpid()} on .* cannot write one run"):
        first.check()
    assert sorted(path.name for path in folder.path.glob("owner*")) == ["owner.json"]


def test_a_checkpoint_of_the_earlier_command_touches_nothing_of_the_later_one(folder: RunFolder) -> None:
    first, config = RunOwner(folder), SaverConfig(asynchronous=True)
    early = Saver(config, folder.checkpoints, print, first.check)
    early.save({}, 3, {})
    second = RunOwner(folder)
    with pytest.raises(CheckpointError, match=r"step 3 could not be written; rank 0: .* was opened by process"):
        early.finish()
    assert not (folder.checkpoints / "step_000003").exists()
    late = Saver(config, folder.checkpoints, print, second.check)
    late.save({}, 3, {})
    with pytest.raises(CheckpointError, match="was opened by process"):
        early.save({}, 4, {})
    late.finish()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000003"]


@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_that_is_still_trained_here_is_not_resumed(
    folder: RunFolder, other: subprocess.Popen[bytes], adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_owner, "ENDING_S", 0.3)
    config = Config(resume=str(folder.path))

    def resume() -> None:
        make_folder(config)

    owned = make_adapter_folder(folder, "one", Config()) if adapters else folder
    owned_by(owned, other)
    with pytest.raises(UserError, match=rf"still trained by process {other.pid} on this host since .*; end it first"):
        resume()
    assert not (folder.path / "config.resumed.yaml").exists()
    copied = shutil.copytree(folder.path, folder.path.with_name("copy"))
    make_folder(Config(resume=str(copied)))
    owned_by(owned, other, host="another")
    resume()
    owned_by(owned, other, process_started=1.0)  # another process had its number
    resume()
    owned_by(owned, other)
    other.kill()
    while psutil.Process(other.pid).status() != psutil.STATUS_ZOMBIE:  # its parent has not asked for its end
        time.sleep(0.01)
    resume()


def test_a_folder_of_an_earlier_version_has_no_owner(folder: RunFolder) -> None:
    check_ended(folder)
    owner = RunOwner(folder)
    (folder.path / run_owner.OWNER).unlink()
    owner.check()


def test_the_end_of_an_earlier_command_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def command(_: list[str]) -> int:
        raise RunTakenError("runs/x was opened by process 7")

    assert exit_code(command, [], monkeypatch) == 1
    assert capsys.readouterr().err == "megarl: runs/x was opened by process 7\n"
