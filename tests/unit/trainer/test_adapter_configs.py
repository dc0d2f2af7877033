"""Configurations of a job's adapters: their own knobs, the job's, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl import cli, train
from megarl.algorithms import DAPOConfig, GRPOConfig
from megarl.knobs import UserError
from megarl.trainer.adapter_configs import load_adapters

PAGE = Path(__file__).parents[3] / "docs" / "lora.md"
JOB = ["+experiment=gsm8k_grpo", "actor.lora.rank=4", "actor.lora.sync=adapters"]


def test_the_file_on_the_page_is_a_job_of_two_adapters(tmp_path: Path) -> None:
    block = re.search(r"```yaml adapters.yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert block is not None
    (tmp_path / "adapters.yaml").write_text(block[1])
    arguments, _ = cli.from_files(["--config", str(tmp_path / "adapters.yaml")])
    job = cli.load(arguments)
    configs = load_adapters(arguments, job)
    careful, bold = configs["careful"], configs["bold"]
    assert list(configs) == list(job.adapters) == ["careful", "bold"]
    assert (type(careful.algorithm), type(bold.algorithm)) == (GRPOConfig, DAPOConfig)
    assert (careful.actor.optimizer.lr, bold.actor.optimizer.lr) == (1e-3, 3e-3)
    assert (careful.total_train_steps, bold.total_train_steps) == (80, 40)
    assert (careful.experiment_name, bold.experiment_name) == ("careful", "bold")
    # The seed of the data is the adapter's own; model and servers keep the job's.
    assert (careful.train_dataset.seed, bold.train_dataset.seed) == (1, 2)
    assert (bold.actor.init_seed, bold.server.random_seed) == (1, 1)


def test_an_adapter_resumes_in_its_own_folder_and_one_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    arguments = [*JOB, "+adapters={a:[],b:[]}", f"resume={tmp_path}"]
    (tmp_path / "adapters" / "a" / "checkpoints" / "step_000001").mkdir(parents=True)
    configs = load_adapters(arguments, cli.load(arguments))
    assert configs["a"].resume == str(tmp_path / "adapters" / "a")
    assert configs["b"].resume is None


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (
            "parallel.tp_size=2",
            r"parallel\.tp_size=2 is not the job's \(1\), and all adapters share it: .*; set it for the job",
        ),
        ("actor.lora.rank=8", r"actor\.lora\.rank=8 is not the job's \(4\)"),
        ("actor.lora.targets=[q_proj]", r"actor\.lora\.targets=\['q_proj'\] is not the job's"),
        ("server.n_servers=3", r"server\.n_servers=3 is not the job's"),
        ("reshard.delta=true", r"reshard\.delta=True is not the job's"),
        ("sede=2", r"unknown config key sede; did you mean seed\?"),
        ("algorithm=grpoo", r"algorithm=grpoo does not exist"),
        ("gconfig.n_samples=0", r"gconfig\.n_samples=0"),
    ],
)
def test_a_knob_that_an_adapter_cannot_set_is_told_with_its_name(own: str, says: str) -> None:
    arguments = [*JOB, f'+adapters.a=["{own}"]']
    with pytest.raises(UserError, match=r"^adapters\.a: " + says):
        load_adapters(arguments, cli.load(arguments))


def test_a_teacher_is_refused(tmp_path: Path) -> None:
    arguments = ["+experiment=opd", *JOB[1:], "+adapters.a=[]"]
    with pytest.raises(UserError, match="algorithm=opd has a teacher, which several adapters cannot share"):
        load_adapters(arguments, cli.load(arguments))


def test_a_script_of_ones_own_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("")
    with pytest.raises(
        UserError, match=r"adapters=\['a'\] are trained by megarl's own loop, and .*own\.py brings another"
    ):
        train.command([*JOB, "+adapters.a=[]", str(script)])
