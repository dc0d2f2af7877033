"""Rank 0's side of rollouts: its choice of servers, its limits, and its refusals before a server starts."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megarl import cli
from megarl.algorithms import algorithm_of
from megarl.config import Config
from megarl.knobs import UserError
from megarl.observe.run_folder import new_run
from megarl.parallel.rendezvous import JOB_FOLDER
from megarl.rollout.client.connections import ADDRESSES_VARIABLE, KEY_VARIABLE
from megarl.rollout.servers.external import ExternalServers, JobServers
from megarl.rollout.servers.sglang_server import SGLangServers
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.remax import ReMaxRLVRWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts.rank0_rollouts import Rank0Rollouts, max_sequence_tokens
from megarl.trainer.rollouts.rank0_servers import choose_servers


def configured(*overrides: str) -> Config:
    return cli.load(["+experiment=gsm8k_grpo", *overrides])


@pytest.fixture(autouse=True)
def no_servers_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADDRESSES_VARIABLE, KEY_VARIABLE, JOB_FOLDER):
        monkeypatch.delenv(name, raising=False)


def test_servers_named_in_the_environment_come_before_the_jobs_and_those_before_ones_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured("server.n_servers=2")
    servers = choose_servers(config, tmp_path)
    assert isinstance(servers, SGLangServers)
    assert len(servers.servers) == 2
    monkeypatch.setenv(JOB_FOLDER, str(tmp_path))
    assert isinstance(choose_servers(config, tmp_path), JobServers)
    monkeypatch.setenv(ADDRESSES_VARIABLE, "127.0.0.1:9")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    servers = choose_servers(config, tmp_path)
    assert type(servers) is ExternalServers
    assert (servers.addresses, servers.api_key) == (["127.0.0.1:9"], "secret")


@pytest.mark.cpu_options("servers take float32 in a deterministic run on CPU only")
@pytest.mark.parametrize("variable", [ADDRESSES_VARIABLE, JOB_FOLDER])
def test_a_deterministic_run_refuses_servers_that_it_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(UserError, match="deterministic=true needs servers that this run starts on this machine"):
        choose_servers(configured("deterministic=true"), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ([], 512),  # positions of the bundled model
        (["actor.max_tokens_per_mb=300"], 300),
        (["server.max_total_tokens=200"], 200),
        (["server.max_total_tokens=0", "+sglang.context_length=100"], 100),
    ],
)
def test_the_longest_sequence_is_what_servers_and_trainer_can_process(overrides: list[str], tokens: int) -> None:
    config = configured(*overrides)
    assert max_sequence_tokens(config, read_inputs(config, rank=1).model) == tokens


@pytest.mark.parametrize(
    ("overrides", "trained", "evaluated"),
    [
        (["rollout.workflow=multi_turn"], MultiTurnWorkflow, MultiTurnWorkflow),
        (["algorithm=remax"], ReMaxRLVRWorkflow, RLVRWorkflow),
    ],
)
def test_evaluation_has_the_trainings_workflow_and_its_own_sampling(
    tmp_path: Path, overrides: list[str], trained: type, evaluated: type
) -> None:
    config = configured(*overrides, "evaluator.n_samples=3", f"run_root={tmp_path}")
    rank0 = Rank0Rollouts(config, new_run(config.run_root, "x"), read_inputs(config, 0), algorithm_of(config.algorithm))
    try:
        assert type(rank0.workflow) is trained
        assert type(rank0.evaluator.workflow) is evaluated
        assert (rank0.workflow.gconfig.n_samples, rank0.evaluator.workflow.gconfig.n_samples) == (8, 3)  # type: ignore[attr-defined]
    finally:
        rank0.close()


def test_a_workflow_that_cannot_be_built_ends_what_was_started_before_it(tmp_path: Path) -> None:
    config = configured("rollout.workflow=no_such_module.Own", f"run_root={tmp_path}")
    inputs, before = read_inputs(config, 0), set(psutil.Process().children(recursive=True))
    with pytest.raises(UserError, match=r"rollout\.workflow=no_such_module\.Own cannot be imported"):
        Rank0Rollouts(config, new_run(config.run_root, "x"), inputs, algorithm_of(config.algorithm))
    assert set(psutil.Process().children(recursive=True)) <= before  # the reward processes have ended
