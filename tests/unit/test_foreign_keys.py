"""Every key of another trainer's file has a row or is refused at its line, and later mistakes are told in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import other_trainers
from megarl.foreign.areal import read_areal
from megarl.foreign.reading import Converted, Origin, flat
from megarl.foreign.verl import read_verl
from megarl.foreign.yaml_file import Lines, lines_of
from megarl.knobs import UserError
from tests.exit_codes import exit_code, reads_its_configuration
from tests.unit.test_foreign import ACTOR, AREAL, ROWS, TRL, VERL, from_areal, knobs, trl

GSM8K_GRPO = """\
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
enable_offload: false
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster:
  n_nodes: 1
  n_gpus_per_node: 8
  fileroot: /tmp/areal/experiments
  name_resolve: {type: nfs, nfs_record_root: /tmp/areal/name_resolve}
allocation_mode: sglang:d4p1t1+d4p1t1
scheduler: {type: null}
rollout:
  experiment_name: ${experiment_name}
  max_concurrent_rollouts: 256
  queue_size: null
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
  check_trajectory_format: false
  schedule_policy: round_robin
  setup_timeout: 120.0
  request_timeout: 3600
  request_retries: 3
  scheduling_spec: ${actor.scheduling_spec}
  dump_to_file: true
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, max_tokens: 65536, frequency_penalty: 0.0}
actor:
  path: some/model
  attn_impl: flash_attention_2
  init_from_scratch: false
  disable_dropout: true
  pad_to_maximum: false
  use_lora: false
  lora_rank: 32
  mb_spec: {max_tokens_per_mb: 10240, n_mbs: 1, granularity: 1, n_mbs_divisor: 1}
  optimizer: {type: adam, lr: 1.70e-5, offload: false, initial_loss_scale: 4294967296, hysteresis: 2}
  eps_clip: 0.4
  c_clip: null
  discount: 1.0
  gae_lambda: 1.0
  kl_ctl: 0.0
  kl_estimator: k1
  importance_sampling_level: token
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  reward_norm: {mean_level: group, std_level: group, group_size: 4}
  weight_update_mode: xccl
  max_new_tokens: ${gconfig.max_new_tokens}
  scheduling_spec: [{task_type: worker, gpu: 1}]
ref:
  path: ${actor.path}
  disable_dropout: true
  optimizer: null
  scheduling_strategy: {type: colocation, target: actor}
sglang: {model_path: "${actor.path}", enable_torch_compile: false, triton_attention_num_kv_splits: 8}
vllm: {model: "${actor.path}", seed: 1, max_model_len: 32768}
train_dataset: {batch_size: 256, pin_memory: true, path: openai/gsm8k, type: rl, max_length: 1024}
recover: {mode: disabled, freq_secs: 3600, retries: 3}
stats_logger: {wandb: {mode: disabled}, swanlab: {mode: disabled}}
perf_tracer: {enabled: false, session_tracer: {enabled: false}}
"""  # AReaL's examples/math/gsm8k_grpo.yaml without what megarl refuses, and defaults of its cli_args.py


@pytest.fixture(autouse=True)
def in_a_folder_with_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)


def test_every_key_of_areals_example_has_a_row() -> None:
    Path("run.yaml").write_text(GSM8K_GRPO)
    converted = read_areal("run.yaml")
    rows = {line.split()[0] for line in converted.table.splitlines()[1:]}
    assert set(flat(yaml.safe_load(GSM8K_GRPO))) - rows == set()
    assert knobs(converted)["algorithm"] == "decoupled_ppo"
    for old, new, message in (
        ("lora_rank: 32", "lora_rank: 64", "run.yaml:35: actor.lora_rank: 64  is not one of 32"),
        ("discount: 1.0", "discount: 0.9", "run.yaml:40: actor.discount: 0.9  is not one of 1.0"),
        ("mean_level: group", "mean_level: batch", "actor.reward_norm.mean_level: batch  is not one of group; GRPO"),
        ("dump_to_file: true", "dump_to_fil: false", "run.yaml:26: rollout.dump_to_fil: false  is not a supported key"),
    ):
        assert old in GSM8K_GRPO
        Path("run.yaml").write_text(GSM8K_GRPO.replace(old, new))
        with pytest.raises(UserError) as error:
            read_areal("run.yaml")
        assert message in str(error.value)


def test_areals_files_of_other_methods_are_refused_as_such() -> None:
    Path("sft.yaml").write_text("seed: 1\nmodel:\n  path: some/model\n")
    with pytest.raises(UserError, match=r"sft\.yaml:2: model is the section of AReaL's SFT and reward files"):
        read_areal("sft.yaml")


def test_a_key_of_control_characters_stays_in_one_line() -> None:
    with pytest.raises(UserError) as error:
        from_areal(**{"a\nb": ["${gone}"]})
    assert "'a\\nb[0]': Interpolation key 'gone' not found" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("trainer", ["trl", "verl", "areal"])
def test_false_means_off_for_known_keys_alone(trainer: str) -> None:
    known = {"trl": "push_to_hub", "verl": "data.return_full_prompt", "areal": "enable_offload"}[trainer]
    read: Any = {
        "trl": lambda key: trl("grpo", **{key: False}),
        "verl": lambda key: read_verl([*VERL, f"{key}=False"]),
        "areal": lambda key: from_areal(**{key: False}),
    }[trainer]
    assert any(line.split()[:2] == [known, "false"] for line in read(known).table.splitlines())
    with pytest.raises(UserError, match=rf"{known}s: false  is not a supported key; did you mean {known}\?"):
        read(f"{known}s")


def test_keys_that_other_keys_decide_have_a_row() -> None:
    decided = {**AREAL["actor"], "behav_imp_weight_cap": 5.0}
    table = from_areal(async_training=False, total_train_steps=9, actor=decided).table
    for row in ("rollout.max_head_offpolicyness", "total_train_epochs", "actor.behav_imp_weight_cap"):
        assert any(line.split()[0] == row for line in table.splitlines()), row
    table = read_verl([*VERL, f"{ACTOR}.kl_loss_coef=0.01", "algorithm.norm_adv_by_std_in_grpo=True"]).table
    for row in (f"{ACTOR}.kl_loss_coef", "algorithm.norm_adv_by_std_in_grpo"):
        assert any(line.split()[0] == row and "read together" in line for line in table.splitlines()), row


def test_null_keys_have_a_row_and_set_nothing() -> None:
    converted = trl("grpo", epsilon_high=None, hub_model_id=None)
    rows = [line.split(maxsplit=3) for line in converted.table.splitlines()]
    assert ["hub_model_id", "(not", "set)", "no change: null"] in rows
    assert ["epsilon_high", "(not", "set)", "no change: null"] in rows
    assert knobs(converted)["algorithm"] == "grpo"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("gconfig.top_p=2.0 must be above 0", "run.yaml:3: top_p=2.0 must be above 0"),
        (
            "actor.optimizer.warmup_steps=5 must be below total_train_steps=4",
            "run.yaml:5: actor.optimizer.warmup_steps=5 must be below max_steps=4 "
            "(actor.optimizer.warmup_steps is warmup_ratio, max_steps is at run.yaml:4)",
        ),
        ("raise gconfig.top_p, or lower it", "run.yaml:3: raise top_p, or lower it"),
        ("experiment_name=a/b must be one folder name", "run.yaml:6: run_name=a/b must be one folder name"),
        ("the experiment_name of a run", "the experiment_name of a run"),
        ("parallel.tp_size=3 does not divide", "parallel.tp_size=3 does not divide"),
        ("other.yaml/gconfig.top_p is no file", "other.yaml/gconfig.top_p is no file"),
        ("run.yaml:9: gconfig.top_p=3", "run.yaml:9: gconfig.top_p=3"),
    ],
)
def test_knobs_in_a_message_become_the_files_keys(message: str, told: str) -> None:
    origins = {
        "gconfig.top_p": Origin("top_p"),
        "total_train_steps": Origin("max_steps"),
        "actor.optimizer.warmup_steps": Origin("warmup_ratio", same=False),
        "experiment_name": Origin("run_name"),
    }
    lines = Lines("run.yaml", {"top_p": 3, "max_steps": 4, "warmup_ratio": 5, "run_name": 6})
    assert Converted([], "", "run.yaml", origins, lines).in_its_words(message) == told
    verl = Converted([], "", "the verl command line", origins)
    if told.startswith("run.yaml:3: top_p"):
        assert verl.in_its_words(message) == "top_p=2.0 must be above 0 (in the verl command line)"


def test_a_knob_that_the_command_line_sets_is_not_the_files() -> None:
    Path("run.yaml").write_text(yaml.safe_dump({**TRL, "top_p": 0.5}))
    _, converted = other_trainers.from_other_trainer(["--from-trl", "grpo", "run.yaml", "gconfig.top_p=2.0"])
    assert converted is not None
    assert converted.in_its_words("gconfig.top_p=2.0 must be") == "gconfig.top_p=2.0 must be"


def test_lines_of_keys_are_found_through_lists_aliases_and_merges() -> None:
    text = "a: &x\n  b: 1\nc:\n- d: 2\n- *x\n- {<<: *x, e: [1, 2]}\nf.g: 3\n"
    lines = lines_of("run.yaml", text)
    expected = {"a": 1, "a.b": 2, "c": 3, "c[0].d": 4, "c[1]": 1, "c[2].e[1]": 6, "f.g": 7}
    assert {key: lines.by_key[key] for key in expected} == expected
    assert lines.at("c[1].b") == "run.yaml:1"  # where the anchor is
    assert lines.at("c[0].z.y") == "run.yaml:4"
    assert lines.at("gone x a.b") == "run.yaml:2"
    assert lines.at("gone") == ""


def test_a_mistake_is_told_in_the_words_of_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.yaml").write_text(yaml.safe_dump({**TRL, "top_p": 2.0}))
    assert exit_code(reads_its_configuration, ["--from-trl", "grpo", "run.yaml"], monkeypatch) == 2
    line = Path("run.yaml").read_text().splitlines().index("top_p: 2.0") + 1
    assert capsys.readouterr().err.splitlines()[0].startswith(f"megarl: run.yaml:{line}: top_p=2.0 must be above 0")
