"""Every recipe of configs/experiment is complete and would run, and docs/recipes.md has preflight's figures."""

from __future__ import annotations

import re
import shutil
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl import cli
from megarl.config import Config
from megarl.families import read_config
from megarl.knobs import UserError
from megarl.launcher.machines import machines_of
from megarl.preflight import report, shapes, sync_report
from megarl.preflight.planned_sync import planned_sync
from megarl.preflight.roofline import estimate_step
from megarl.preflight.sizing import cache_of, disk_of, peaks_of, size

EXPERIMENTS = sorted(path.stem for path in (cli.CONFIGS / "experiment").glob("*.yaml"))
CLUSTER = (
    "grpo_0_5b",
    "grpo_1_5b",
    "grpo_1_7b",
    "grpo_7b",
    "grpo_7b_colocated",
    "grpo_70b",
    "grpo_moe_235b",
    "dapo_32b",
    "sft_8b",
    "dpo_8b",
    "opd_8b",
)
PAGE = (cli.CONFIGS.parent / "docs" / "recipes.md").read_text()


@pytest.fixture
def problems(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Problems that would stop an experiment; "" if there are none."""

    def of(name: str) -> str:
        try:
            code = report.command([f"+experiment={name}", "show=batch"])
        except UserError as error:
            return str(error)
        text = capsys.readouterr().out
        assert (code == 0) == text.endswith("\n0 problems that would stop the run\n")
        return "" if code == 0 else text

    return of


NEEDS = {  # recipes that need more than `make setup` installs -> knobs that name what lacks it, the problem
    "environment_mcp": ("", r"mcp is missing; \S+ -m pip install mcp==\S+, or name another interpreter by .*"),
    "environment_mcp_http": ("", r"mcp is missing; \S+ -m pip install mcp==\S+, or name another interpreter by .*"),
    "environment_openenv": ("", r"openenv\.core is missing; \S+ -m pip install openenv==\S+, or name another .*"),
    "environment_verifiers": ("", r"verifiers\.v1 is missing; \S+ -m pip install verifiers==\S+, or name another .*"),
    "environment_harbor": (
        "rollout.environment.harbor.docker=no-docker",
        "there is no program no-docker; install Docker, or set rollout.environment.harbor.docker",
    ),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_recipe_that_needs_more_says_in_one_line_what_to_install(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    knob, problem = NEEDS[name]
    if not knob:
        venv.create(tmp_path / "bare", with_pip=False)
        knob = f"rollout.environment.python={tmp_path / 'bare' / 'bin' / 'python'}"
    assert report.command([f"+experiment={name}", "show=batch", knob]) == 1
    *_, stops, total = capsys.readouterr().out.splitlines()
    kind = cli.load([f"+experiment={name}"]).rollout.environment.kind
    assert re.fullmatch(rf"STOPS  the environment {kind} cannot start: (\w+: )?{problem}", stops)
    assert total == "1 problem that would stop the run"


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in NEEDS])
def test_every_experiment_passes_preflight(name: str, problems: Callable[[str], str]) -> None:
    assert problems(name) == ""


BASED_ON_70B = "# @package _global_\ndefaults: [grpo_70b, _self_]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            BASED_ON_70B + "parallel: {tp_size: 7}\n",
            "parallel.tp_size=7 does not divide the model's num_attention_heads",
        ),
        (BASED_ON_70B + "algorithm: {n_minibatches: 3}\n", "do not divide into algorithm.n_minibatches=3"),
        (
            BASED_ON_70B + "actor: {recompute: none, max_tokens_per_mb: 131072}\n",
            "over 95% of cluster.gpu_memory_gib=80",
        ),
        (BASED_ON_70B + "actor: {learning_rate: 1}\n", "unknown config key actor.learning_rate"),
        ("# @package _global_\ndefaults: [{override /model: no_such}]\n", "model=no_such does not exist"),
    ],
)
def test_an_experiment_that_would_not_run_is_refused(
    text: str, message: str, problems: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(cli.CONFIGS, tmp_path / "configs")
    (tmp_path / "configs" / "experiment" / "bad.yaml").write_text(text)
    monkeypatch.setattr(cli, "CONFIGS", tmp_path / "configs")
    assert problems("grpo_70b") == ""
    assert message in problems("bad")


@pytest.mark.parametrize("path", sorted((cli.CONFIGS / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_model_group_names_a_model_whose_shape_is_known(path: Path) -> None:
    config = cli.composed([f"model={path.stem}"])
    model = read_config(str(report.folder_of(config.actor.path)))
    assert str(model.dtype).removeprefix("torch.") == config.actor.dtype  # trained as it was stored
    assert config.server.dtype == config.actor.dtype


def test_every_known_model_has_a_group_but_twins() -> None:
    named = {cli.composed([f"model={path.stem}"]).actor.path for path in (cli.CONFIGS / "model").glob("*.yaml")}
    twins = {"Qwen/Qwen2.5-32B-Instruct", "openai/gpt-oss-20b", "openai/gpt-oss-120b"}  # others have their shapes
    assert set(shapes.known_models()) - named == twins


@pytest.mark.parametrize("name", CLUSTER)
def test_a_cluster_recipe_evaluates_saves_and_plans_for_gpus(name: str) -> None:
    config = cli.load([f"+experiment={name}"])
    assert config.experiment_name == name
    assert config.cluster.gpus_per_node > 0
    assert 0 < config.evaluator.every_steps < config.total_train_steps
    assert 0 < config.saver.every_steps < config.total_train_steps
    assert config.valid_dataset.path not in ("arithmetic", "")
    assert config.valid_dataset.max_length is not None


def row_of(name: str, config: Config) -> str:
    """The recipe's line in docs/recipes.md."""
    model = read_config(str(report.folder_of(config.actor.path)))
    machines, disk = machines_of(config), disk_of(config, model)
    peak = max(peaks_of(config, model))
    sync = planned_sync(config, model) if config.method == "rl" else None
    step = estimate_step(
        config, model, sync_report.summarise(sync).seconds(config.cluster.network_gb_s * 1e9) if sync else 0.0
    )
    layout = " ".join(
        f"{short}{count}"
        for short in ("tp", "pp", "vpp", "cp", "dp", "ep")
        if (count := getattr(config.parallel, f"{short}_size") or 1) > 1
    )
    cells = [
        f"`{name}`",
        layout or "one GPU",
        f"{machines.servers} x tp{machines.server_tp}" if machines.servers else "-",
        f"{machines.nodes} x {machines.gpus_per_node}",
        size(peak),
        f"{cache_of(config, model).tokens // 1000:,}k" if machines.servers else "-",
        size(disk.total),
        sync_report.duration(step.step_s),
        step.bottleneck.removeprefix("the ") if machines.servers else "-",
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", CLUSTER)
def test_the_page_has_the_figures_of_preflight(name: str) -> None:
    assert row_of(name, cli.load([f"+experiment={name}"])) in PAGE


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (["+sglang.mem_fraction_static=0.95"], "sampling: pipeline rank 0 with 3.1 GiB and a server rank with "),
        (["actor.max_tokens_per_mb=65536"], "training: pipeline rank 0 with "),
        (["cluster.gpu_memory_gib=12", "+sglang.mem_fraction_static=0.5"], "syncing: pipeline rank 0 with "),
    ],
)
def test_each_phase_of_a_shared_gpu_is_held_to_its_memory(
    knobs: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.command(["+experiment=grpo_1_7b", "show=memory", *knobs]) == 1
    assert message in capsys.readouterr().out
