"""Several adapters trained in one job on one base and the same servers, beside runs of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl import cli, train
from megarl.observe.logger import read_metrics
from megarl.observe.run_folder import RunFolder
from megarl.preflight.planned_sync import planned_sync
from megarl.rollout.executor import NoSamplesError
from megarl.served_checks import adapters_on_servers
from megarl.trainer.inputs import read_inputs
from megarl.trainer.rollouts.rollout_driver import RolloutDriver

ARGUMENTS = [
    "+experiment=gsm8k_grpo", "train_dataset.batch_size=4", "gconfig.n_samples=4", "server.n_servers=1",
    "server.max_restarts=0", "actor.lora.rank=4", "actor.lora.sync=adapters", "actor.optimizer.lr=1e-2",
    "total_train_steps=4", "evaluator.every_steps=0", "evaluator.at_start=false", "evaluator.n_samples=1",
    "saver.every_steps=1", "saver.keep=9", "algorithm.n_minibatches=1", "rollout.max_head_offpolicyness=0",
    "server.heartbeat_s=300",
]  # fmt: skip
OWN: dict[str, list[str]] = {
    "first": ["actor.lora.dropout=0.1"],
    "second": [
        "algorithm=dapo", "seed=7", "actor.optimizer.lr=4e-3", "total_train_steps=3", "algorithm.n_minibatches=2",
    ],
}  # fmt: skip
FIXED = [
    "rollout.rollout_func=tests.e2e.fixed_answers.answer",
    "rewards.functions=[tests.e2e.fixed_answers.length]",
]  # fmt: skip
COMPARED = ("train/loss", "train/grad_norm", "train/lr", "rollout/reward")


def job(root: Path, *more: str, own: Mapping[str, Sequence[str]] = OWN) -> RunFolder:
    """Runs a job of adapters to its end."""
    knobs = [f"+adapters.{name}={json.dumps(list(overrides))}" for name, overrides in own.items()]
    threads = torch.get_num_threads()
    assert train.command([*ARGUMENTS, f"run_root={root}", *knobs, *more]) == 0
    torch.set_num_threads(threads)
    return RunFolder((root / "gsm8k_grpo" / "latest").resolve())


def single(root: Path, overrides: Sequence[str], *more: str) -> RunFolder:
    """Runs one adapter's training as a run of its own."""
    threads = torch.get_num_threads()
    arguments = [*ARGUMENTS, *overrides, "experiment_name=alone", f"run_root={root}", "server.random_seed=1", *more]
    assert train.command(arguments) == 0
    torch.set_num_threads(threads)
    return RunFolder((root / "alone" / "latest").resolve())


def trained(folder: RunFolder) -> dict[str, Any]:
    """The adapter that a run ended with."""
    return load_file(folder.path / "hf" / "adapter_model.safetensors")


def numbers(folder: RunFolder) -> list[tuple[float, ...]]:
    return [tuple(row[name] for name in COMPARED) for row in read_metrics(folder.metrics) if "train/loss" in row]


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def fixed_job(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A job whose rollouts do not depend on the servers."""
    return job(tmp_path_factory.mktemp("fixed"), *FIXED)


@pytest.mark.long
@pytest.mark.parametrize("name", OWN)
def test_an_adapter_has_the_numbers_of_a_run_of_its_own(name: str, fixed_job: RunFolder, tmp_path: Path) -> None:
    alone = single(tmp_path, OWN[name], *FIXED)
    in_job = fixed_job.adapter(name)
    assert numbers(in_job) == numbers(alone)
    assert len(numbers(alone)) == (3 if name == "second" else 4)
    assert len({loss for loss, *_ in numbers(alone)}) > 1, "the batches differ"
    assert same(trained(in_job), trained(alone))
    assert not same(trained(in_job), trained(fixed_job.adapter("first" if name == "second" else "second")))


@pytest.mark.long
def test_a_job_goes_on_from_checkpoints_of_different_steps(fixed_job: RunFolder, tmp_path: Path) -> None:
    """As a kill between two checkpoints leaves them."""
    killed = tmp_path / "killed"
    shutil.copytree(fixed_job.path, killed, symlinks=True)
    for name, kept in (("first", 2), ("second", 1)):
        own = RunFolder(killed).adapter(name)
        shutil.rmtree(own.path / "hf")
        for folder in own.checkpoints.glob("step_*"):
            if int(folder.name.removeprefix("step_")) > kept:
                shutil.rmtree(folder)
    job(tmp_path, *FIXED, f"resume={killed}")
    for name in OWN:
        resumed, whole = RunFolder(killed).adapter(name), fixed_job.adapter(name)
        assert same(trained(resumed), trained(whole))
        assert numbers(resumed) == numbers(whole)


@pytest.mark.long
@pytest.mark.parametrize(("failing", "call", "saved"), [("second", 2, (2, 1)), ("first", 3, (2, 2))])
def test_a_job_without_a_sample_for_one_adapter_saves_the_last_steps_of_all(
    failing: str,
    call: int,
    saved: tuple[int, int],
    fixed_job: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those before it have taken their updates of the round, whose weights reach no server; those after it have not."""
    next_batch, calls = RolloutDriver.next_batch, []

    def fail(rollouts: RolloutDriver) -> Any:
        calls.append(rollouts.config.experiment_name)
        if calls.count(failing) == call:
            raise NoSamplesError("no sample is left")
        return next_batch(rollouts)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutDriver, "next_batch", fail)
        with pytest.raises(NoSamplesError, match="no sample is left"):
            job(tmp_path, *FIXED, "saver.every_steps=0")
    ended = RunFolder((tmp_path / "gsm8k_grpo" / "latest").resolve())
    for name, done in zip(("first", "second"), saved, strict=True):
        steps = sorted(folder.name for folder in ended.adapter(name).checkpoints.glob("step_*"))
        assert steps[-1] == f"step_{done:06d}"
        rows = [row["step"] for row in read_metrics(ended.adapter(name).metrics) if "train/loss" in row]
        assert rows == list(range(1, done + 1))
    job(tmp_path, *FIXED, f"resume={ended.path}")
    for name in OWN:
        assert same(trained(ended.adapter(name)), trained(fixed_job.adapter(name)))


@pytest.mark.long
def test_a_job_samples_from_each_adapter_what_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = job(tmp_path)
    config = cli.load([*ARGUMENTS, f"+adapters={{{','.join(f'{name}:[]' for name in OWN)}}}"])
    plan = planned_sync(config, read_inputs(config, 1).model, adapters_on_servers(config))
    for name, steps in (("first", 4), ("second", 3)):
        folder = done.adapter(name)
        rows = [row for row in read_metrics(folder.metrics) if "train/loss" in row]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert all(row["train/logprob_diff_max"] <= 1e-4 for row in rows)
        assert all(row["sync/canary_logprob_diff_max"] <= 1e-4 for row in rows)
        assert all(row["sync/verified"] == 1 for row in rows)
        assert [round(row["sync/mbytes"] * 1e6) for row in rows[1:]] == [int(plan.bytes_in.sum())] * (steps - 1)
        assert all(row["rollout/staleness_max"] == 0 for row in rows)
        summary = json.loads(folder.summary.read_text())
        assert (summary["experiment"], summary["steps"]) == (name, steps)
        assert folder.curve.is_file()
    printed = capsys.readouterr().out
    assert "first  step 4/4" in printed
    assert "second  step 3/3" in printed
    assert "second  step 4" not in printed


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"a": ["parallel.tp_size=2"]}, r"adapters\.a: parallel\.tp_size=2 is not the job's \(1\), and all adapters"),
        ({"a": ["actor.lora.rank=8"]}, r"adapters\.a: actor\.lora\.rank=8 is not the job's \(4\)"),
        ({"a": [], "b": ["sede=3"]}, r"adapters\.b: unknown config key sede; did you mean seed\?"),
        ({"a": ["algorithm=opd"]}, r"adapters\.a: .*"),
        ({"a": ["train_dataset.path=/no/such.jsonl"]}, r"/no/such\.jsonl"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_named_before_anything_starts(
    own: dict[str, list[str]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(cli.UserError, match=says):
        job(tmp_path, own=own)
    assert not (tmp_path / "gsm8k_grpo").exists()
