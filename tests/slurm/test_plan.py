"""Parts of a job, without a cluster: templates, the node plan, the script that the launcher submits."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from megarl import cli
from megarl.knobs import UserError
from megarl.launcher import slurm
from megarl.observe.run_folder import RunFolder, new_run
from megarl.rollout.servers.gpu_placement import visible_gpus
from megarl.trainer.checkpoints import manifest

SCRIPTS = Path(slurm.SCRIPTS)
TEMPLATES = sorted(path for path in SCRIPTS.glob("*.sh") if "\n#SBATCH" in path.read_text())


def directives(script: str) -> dict[str, str]:
    """`#SBATCH --name=value` lines; "" for those without a value."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", script, re.MULTILINE))


def test_there_is_a_template_for_each_kind_of_run() -> None:
    names = ["dpo.sh", "evaluate.sh", "grpo_70b.sh", "grpo_7b.sh", "grpo_moe_235b.sh", "sft.sh"]
    assert [path.name for path in TEMPLATES] == names


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_asks_for_what_its_experiment_plans(template: Path) -> None:
    text = template.read_text()
    (experiment,) = re.findall(r"^(?:train|evaluate) \+experiment=(\w+)", text, re.MULTILINE)
    arguments = [f"+experiment={experiment}"]
    made = directives(slurm.rendered(cli.composed(arguments), arguments))
    written = directives(text)
    written.pop("time")
    assert written == made


def test_no_hyperparameter_is_written_in_a_script() -> None:
    knobs = [path for path in cli.knob_paths() if "." in path]
    assert len(knobs) > 100
    for script in SCRIPTS.glob("*.sh"):
        lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
        assert not [line for line in lines if any(f"{knob}=" in line for knob in knobs)]


def test_a_rendered_script_is_a_whole_job_that_bash_can_read(tmp_path: Path) -> None:
    arguments = ["my train.py", "+experiment=grpo_70b", "gconfig.stop=[' ']"]
    script = slurm.rendered(cli.composed(arguments[1:2]), arguments)
    assert directives(script)["nodes"] == "12"
    assert script.endswith("train 'my train.py' +experiment=grpo_70b 'gconfig.stop=['\"'\"' '\"'\"']'\n")
    (tmp_path / "job.sh").write_text(script)
    assert subprocess.run(["bash", "-n", str(tmp_path / "job.sh")]).returncode == 0


def plan(*overrides: str) -> slurm.NodePlan:
    return slurm.plan_of(cli.composed(["+experiment=grpo_70b", *overrides]))


def test_trainers_come_first_and_servers_on_nodes_of_their_own() -> None:
    assert plan() == slurm.NodePlan(64, 8, 8, 4, 1, 4, 8, 0)
    assert plan("server.tp_size=2", "server.n_servers=6") == slurm.NodePlan(64, 8, 8, 6, 4, 2, 8, 0)
    assert plan().nodes == 12


def test_servers_share_the_trainers_last_node_where_it_has_room_for_all() -> None:
    small = ("parallel.dp_size=1", "parallel.pp_size=3", "parallel.cp_size=1", "server.tp_size=2")
    assert plan(*small, "server.n_servers=2") == slurm.NodePlan(12, 8, 2, 2, 2, 1, 1, 4)
    assert plan(*small, "server.n_servers=3").first_server_node == 2


def test_supervised_runs_have_no_servers() -> None:
    assert slurm.plan_of(cli.composed(["+experiment=sft_8b"])) == slurm.NodePlan(8, 8, 1, 0, 0, 0, 0, 0)


def test_a_server_that_would_lie_on_two_nodes_is_refused() -> None:
    with pytest.raises(UserError, match=r"server\.tp_size=3 does not divide cluster\.gpus_per_node=8"):
        plan("server.tp_size=3")


def test_every_server_of_a_node_has_gpus_of_its_own() -> None:
    """Its own come first, then those that only cuda_ipc reads."""
    eight = [str(i) for i in range(8)]
    assert visible_gpus(2, 0, 4, eight) == "4,5,0,1,2,3,6,7"
    assert visible_gpus(2, 1, 4, eight) == "6,7,0,1,2,3,4,5"
    assert visible_gpus(2, 1, 0, ["3", "5", "6", "7"]) == "6,7,3,5"
    with pytest.raises(UserError, match=r"needs GPUs 4 to 5, and 4 are offered"):
        visible_gpus(2, 0, 4, eight[:4])


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")


@pytest.mark.usefixtures("job")
def test_a_job_keeps_its_folder_and_makes_another_attempt_in_it(tmp_path: Path) -> None:
    config = cli.load(["+experiment=gsm8k_grpo", f"run_root={tmp_path}"])
    first, second = slurm.prepare(config), slurm.prepare(config)
    assert first["RUN_FOLDER"] == second["RUN_FOLDER"] == str(tmp_path / "gsm8k_grpo" / "job_17")
    assert [Path(values["LOGS"]).name for values in (first, second)] == ["attempt_1", "attempt_2"]
    assert (tmp_path / "gsm8k_grpo" / "latest").readlink() == Path("job_17")
    assert (first["RESUME"], second["RESUME"]) == ("", "")
    assert not any(Path(second["JOB_FOLDER"]).iterdir())


@pytest.mark.usefixtures("job")
def test_a_requeued_job_of_adapters_goes_on_if_one_has_a_checkpoint(tmp_path: Path) -> None:
    config = cli.load(["+experiment=gsm8k_grpo", f"run_root={tmp_path}"])
    folder = Path(slurm.prepare(config)["RUN_FOLDER"])
    checkpoint = RunFolder(folder).adapter("a").checkpoints / "step_000001"
    checkpoint.mkdir(parents=True)
    assert slurm.prepare(config)["RESUME"] == "", "it is not whole"
    (checkpoint / "weights").write_text("1")
    manifest.seal(checkpoint, 1, manifest.describe(checkpoint, [checkpoint / "weights"]))
    assert slurm.prepare(config)["RESUME"] == f"resume='{folder}'"


@pytest.mark.usefixtures("job")
def test_a_run_that_its_user_resumes_stays_where_it_was(tmp_path: Path) -> None:
    folder = new_run(tmp_path, "mine")
    folder.config.write_text("seed: 1")
    values = slurm.prepare(cli.load(["+experiment=gsm8k_grpo", f"run_root={tmp_path}", f"resume={folder.path}"]))
    assert values["RUN_FOLDER"] == str(folder.path)
    assert values["RESUME"] == ""


SLURM = {
    "squeue": 'if [[ $* == *--format=%e ]]; then echo 2026-11-24T22:54:08; else echo "$STATE"; fi',
    "scontrol": 'echo "scontrol $*"; [[ $1 != show ]] || echo "ExcNodeList=(null)"',
    "srun": "true",
}


def in_job(folder: Path, commands: str, **variables: str) -> tuple[int, str]:
    """Runs commands after job.sh, under a Slurm that only prints what it is told. Returns exit code and output."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in SLURM.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    script = f"source {SCRIPTS / 'job.sh'}\n{commands}"
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def finished(folder: Path, code: int, **variables: str) -> tuple[int, str]:
    """Ends a job by job.sh's `finish`.

    The stand-in covers the script's decision to requeue or end; requeues by a real Slurm are in test_recovery.py.
    """
    settings = "\n".join(f"{name}={value!r}" for name, value in variables.items())
    commands = f"RUN_FOLDER={folder} LOGS={folder} nodes=(node0)\n{settings}\nfinish {code}"
    return in_job(folder, commands, STATE=variables.get("STATE", "RUNNING"))


@pytest.mark.parametrize(
    ("before", "code", "is_requeued"),
    [("", 0, True), ("step_000010", 0, True), ("step_000020", 0, False), ("step_000020", 1, False)],
)
@pytest.mark.parametrize("run", ["", "adapters/a"])
def test_a_job_near_its_time_limit_is_requeued_only_after_a_checkpoint_of_this_attempt(
    tmp_path: Path, run: str, before: str, code: int, is_requeued: bool
) -> None:
    for name in ("step_000010", "step_000020", "step_000030.writing"):
        (tmp_path / run / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / run / "summary.json").write_text('{"stopped_early": true}')
    (tmp_path / "adapters" / "b" / "checkpoints" / "step_000010").mkdir(parents=True)
    ended, text = finished(tmp_path, code, asked="requeue", CHECKPOINT=before)
    assert ("scontrol requeue 7" in text) == is_requeued, text
    assert ended == (0 if is_requeued else 1)
    assert is_requeued or "give more time (sbatch --time)" in text


def test_a_job_told_to_stop_before_its_run_has_a_folder_is_not_requeued(tmp_path: Path) -> None:
    ended, text = finished(tmp_path, 1, asked="requeue", RUN_FOLDER="")
    assert ended == 1
    assert "scontrol requeue" not in text
    assert "the next would get no further" in text


@pytest.mark.parametrize(("given", "told"), [("", "1795560848"), ("1795560000", "1795560000")])
def test_preflight_is_told_when_the_jobs_time_ends(tmp_path: Path, given: str, told: str) -> None:
    """Slurm before 23.02 has no variable for it."""
    commands = 'SLURM_JOB_NODELIST=node0\nhere() { echo "$1 $(printenv SLURM_JOB_END_TIME)"; exit 1; }\nprepare'
    code, text = in_job(tmp_path, commands, SLURM_JOB_END_TIME=given, TZ="UTC")
    assert code == 1
    assert text.splitlines()[-1] == f"megarl.preflight {told}", text


def test_a_preempted_job_is_requeued_without_a_checkpoint_too(tmp_path: Path) -> None:
    assert "scontrol requeue 7" in finished(tmp_path, 1, asked="end")[1]


def test_an_attempt_that_slurm_ended_says_so_and_not_only_its_code(tmp_path: Path) -> None:
    ended, text = finished(tmp_path, 0, asked="end", STATE="COMPLETING")
    assert ended == 0
    assert "stopped by Slurm, job state COMPLETING: Slurm itself requeues it after a failed node" in text
    assert "scontrol requeue" not in text


SAID = """srun: cluster configuration lacks support for cpu binding
srun: error: node1: {first}
srun: launch/slurm: _step_signal: Terminating StepId=5.0
srun: error: node0: tasks 0,2-3: Exited with exit code 1
"""


@pytest.mark.parametrize("first", ["task 1: Killed", "tasks 1,4: Exited with exit code 2"])
def test_a_failed_job_ends_with_the_first_rank_that_failed_and_its_log(tmp_path: Path, first: str) -> None:
    (tmp_path / "rank.srun").write_text(SAID.format(first=first))
    for rank, text in enumerate(["gloo: Error 0", "the cause", "gloo: Error 2", "gloo: Error 3", "gloo: Error 4"]):
        (tmp_path / f"rank_{rank}.log").write_text(f"begin\n{text}\n")
    code, text = finished(tmp_path, 143)
    lines = [line.partition(" ")[2] if line[:1].isdecimal() else line for line in text.splitlines()]
    assert code == 143
    assert lines[-4:] == [
        f"the end of {tmp_path}/rank_1.log:", "begin", "the cause", f"ended with code 143: node1: {first}"
    ]  # fmt: skip
    assert sum("gloo: " in line for line in lines) == 2


@pytest.mark.parametrize("guard", [0, 1])
def test_a_job_with_a_hanging_rank_names_it_and_not_the_rank_that_found_it(tmp_path: Path, guard: int) -> None:
    (tmp_path / "rank.srun").write_text(SAID.format(first=f"task {guard}: Exited with exit code 70"))
    found = "rank 5 makes no progress (parallel.timeout_s=600); rank 5 in stage update, past collective 3"
    for rank in range(6):
        said = f"megarl: {found}" if rank == guard else f"step 1 of rank {rank}"
        (tmp_path / f"rank_{rank}.log").write_text(f"begin\n{said}\nlast\n")
    code, text = finished(tmp_path, 70)
    assert code == 70
    assert text.endswith(f"ended with code 70: {found}\n")
    assert "begin\nstep 1 of rank 5\nlast\n" in text


def test_a_job_without_servers_says_so_and_no_rank_is_to_blame(tmp_path: Path) -> None:
    (tmp_path / "rank.srun").write_text(SAID.format(first="task 0: Killed"))
    assert finished(tmp_path, 137, cause="no server is left")[1].endswith("ended with code 137: no server is left\n")


def test_a_job_is_not_submitted_from_a_folder_that_cannot_take_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\nexit 99\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    config = cli.load(["+experiment=sft_8b"])
    assert slurm.launch(config, ["+experiment=sft_8b"]) == 99
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)  # root may write everywhere
    with pytest.raises(UserError, match=f"job's output to {tmp_path}, which cannot be written"):
        slurm.launch(config, ["+experiment=sft_8b"])
