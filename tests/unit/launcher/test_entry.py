"""The choice of launcher and training script on the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl import cli, train
from megarl.knobs import UserError
from megarl.launcher.job import become_train
from megarl.observe.run_folder import new_run

GRPO = "+experiment=gsm8k_grpo"


def test_a_launchers_command_is_the_trains_with_that_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ray.py", "script.py", GRPO])
    called: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *arguments: called.append(arguments))
    become_train("ray")
    assert called == [(sys.executable, [sys.executable, "-m", "megarl.train", "script.py", GRPO, "launcher=ray"])]


def test_an_unknown_launcher_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="launcher=slrm must be one of local, slurm, ray; did you mean slurm"):
        cli.load([GRPO, "launcher=slrm"])


def test_a_script_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"the training script nowhere\.py is not a file here"):
        train.command(["nowhere.py", GRPO])


def test_a_job_has_servers_unless_others_are_named_or_the_method_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGARL_LLM_SERVER_ADDRS", raising=False)
    run = new_run(tmp_path, "e")
    rl, sft = cli.load([GRPO, "server.n_servers=2", "parallel=dp2"]), cli.load(["+experiment=gsm8k_sft"])
    job = train.job_of(rl, run, ["script.py", GRPO])
    assert (job.world_size, job.servers, job.server_arguments) == (2, 2, (GRPO,))
    assert len(job.environment["MEGARL_LLM_SERVER_API_KEY"]) == 48
    assert job.logs == run.logs / "attempt_1"
    assert job.folder.is_dir()
    assert train.job_of(sft, run, []).servers == 0
    monkeypatch.setenv("MEGARL_LLM_SERVER_ADDRS", "127.0.0.1:1")
    named = train.job_of(rl, run, [GRPO])
    assert (named.servers, dict(named.environment), named.logs.name) == (0, {}, "attempt_3")
