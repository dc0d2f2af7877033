"""`--config FILE` equals the file's keys on the command line, before all other arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl import cli
from megarl.algorithms import GRPOConfig
from megarl.knobs import UserError, override

RECIPES = Path(cli.CONFIGS) / "experiment"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "defaults:\n  - override /data: gsm8k\nexperiment: gsm8k_grpo\nalgorithm: dapo\ntotal_train_steps: 7\n"
        "actor:\n  optimizer:\n    lr: 1e-5\n    warmup_steps: 3\nsglang:\n  attention_backend: triton\n"
        'run_root: "it\'s, {x}: [y]"\nrewards:\n  functions: [gsm8k, math]\nresume: null\n'
    )
    return path


def test_groups_knobs_and_values_of_every_kind_are_read(file: Path) -> None:
    config, found = cli.load_expr_config(["--config", str(file)])
    assert found == file
    assert type(config.algorithm).__name__ == "DAPOConfig"
    assert config.train_dataset.path == "openai/gsm8k"
    assert (config.total_train_steps, config.actor.optimizer.lr, config.actor.optimizer.warmup_steps) == (7, 1e-5, 3)
    assert config.sglang == {"attention_backend": "triton"}
    assert (config.run_root, config.rewards.functions, config.resume) == ("it's, {x}: [y]", ["gsm8k", "math"], None)
    assert config.gconfig.n_samples == 8  # of the recipe


def test_the_command_line_wins_over_the_file(file: Path) -> None:
    config, _ = cli.load_expr_config(
        ["total_train_steps=9", "--config", str(file), "algorithm=grpo", "data=arithmetic"]
    )
    assert isinstance(config.algorithm, GRPOConfig)
    assert (config.total_train_steps, config.train_dataset.path) == (9, "arithmetic")


@pytest.mark.parametrize("name", ["gsm8k_grpo", "grpo_70b", "dpo"])
def test_a_recipe_given_as_a_file_is_the_recipe(name: str) -> None:
    given, _ = cli.from_config_file(["--config", str(RECIPES / f"{name}.yaml")])
    assert cli.composed(given) == cli.composed([f"+experiment={name}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nactor:\n  pth: x\n", ":3: unknown config key actor.pth; did you mean actor.path?"),
        ("- 1\n", "holds a list"),
        ("seed: 1\nactor: [", ":2:9: this is no YAML: "),
        ("seed: 1\nseed: 2\n", ":2: seed is given twice, first in line 1; leave one out"),
        ("seed: 1\n\u0007\n", ":2: this is no YAML: character 0x7 is not allowed"),
        ("seed: 1\nactor:\n  path: ${gone}\n", ":3: Interpolation key 'gone' not found"),
        ("seed: 1\ndefaults:\n  - override /dta: gsm8k\n", ":2: defaults holds {'override /dta': 'gsm8k'}"),
        ("defaults:\n  - _self_\n  - data\n", ":1: defaults holds 'data'"),
        ("seed: 1\ndata: gsm9k\n", ":2: data=gsm9k does not exist; did you mean gsm8k?"),
        ("# a run\ntotal_train_steps: 0\n", ":2: total_train_steps=0 must be at least 1"),
        ("seed: 1\ntotal_train_steps: many\n", ":2: Error merging override total_train_steps='many'; Value"),
        ("seed: 1\nactor:\n\n  optimizer: {lr: -1}\n", ":4: actor.optimizer.lr=-1.0 must be above 0"),
        ("seed: 1\nactor: {tempature: 1}\nexperiment: gsm8k_grpo\n", ":2: unknown config key actor.tempature"),
        ("actor:\n  temperature: 0.5\nexperiment: gsm8k_grpo\n", ":2: actor.temperature=0.5 must equal"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        cli.load_expr_config(["--config", str(tmp_path / "bad.yaml")])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count("bad.yaml") == 1


def test_a_mistake_on_the_command_line_is_not_the_files(file: Path) -> None:
    with pytest.raises(UserError) as error:
        cli.load_expr_config(["--config", str(file), "total_train_steps=0"])
    assert str(error.value).startswith("total_train_steps=0 must be at least 1")


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"seed: 1\n\xff: 2\n")
    with pytest.raises(UserError, match=r"bad\.yaml:2: byte 0xff is not UTF-8"):
        cli.load_expr_config(["--config", str(tmp_path / "bad.yaml")])


def test_a_file_that_is_not_there_or_not_named_is_told() -> None:
    with pytest.raises(UserError, match=r"--config /nowhere/x\.yaml cannot be read"):
        cli.load_expr_config(["--config", "/nowhere/x.yaml"])
    with pytest.raises(UserError, match="--config needs the path"):
        cli.load_expr_config(["total_train_steps=3", "--config"])


def test_a_script_refuses_an_algorithm_that_it_is_not_written_for(file: Path) -> None:
    with pytest.raises(UserError, match="algorithm=dapo is not what this script is for, which is GRPO"):
        cli.load_expr_config(["--config", str(file)], GRPOConfig)


@pytest.mark.parametrize(
    "value",
    ["", "it's", r"back\slash", r"\'", "\\", "a'b\\", "c\\\\", "a\nb\\\n", "a,b", "{x}", "${seed}", "x=1", "日本"],
)
def test_an_override_brings_any_text_through(value: str) -> None:
    wanted = "1" if value == "${seed}" else value
    assert cli.composed([override("run_root", value)]).run_root == wanted
