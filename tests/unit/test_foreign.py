"""Configurations of TRL, verl and AReaL become overrides, or each key that cannot is refused by its own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from megarl import cli, other_trainers
from megarl.algorithms.base import UNBOUNDED
from megarl.foreign import areal, trl_keys, verl_keys
from megarl.foreign.areal import read_areal
from megarl.foreign.reading import Converted, Tables
from megarl.foreign.trl import read_trl
from megarl.foreign.verl import read_verl
from megarl.knobs import UserError
from tests.fuzzing import fuzzed

ACTOR = verl_keys._ACTOR
ROWS = '{"prompt": "2+2", "answer": "4"}\n' * 20
TRL = {
    "model_name_or_path": "some/model", "dataset_name": "rows.jsonl", "reward_funcs": ["rewards.right"],
    "max_steps": 10, "learning_rate": "1e-5",
}  # fmt: skip
VERL = ["algorithm.adv_estimator=grpo", "data.train_files=rows.jsonl", "data.val_files=rows.jsonl",
        "actor_rollout_ref.model.path=some/model", "trainer.total_training_steps=10"]  # fmt: skip
AREAL: dict[str, Any] = {
    "experiment_name": "gsm8k-grpo", "trial_name": "trial0", "allocation_mode": "sglang.d4p1t1+d2p1t2",
    "cluster": {"n_nodes": 1, "n_gpus_per_node": 8, "fileroot": "/tmp/x", "name_resolve": {"type": "nfs"}},
    "seed": 1, "total_train_epochs": 10, "tokenizer_path": "${actor.path}", "async_training": True,
    "rollout": {"max_concurrent_rollouts": 256, "consumer_batch_size": "${train_dataset.batch_size}",
                "max_head_offpolicyness": 4, "queue_size": None},
    "gconfig": {"n_samples": 4, "max_new_tokens": 512, "greedy": False, "temperature": 1.0},
    "actor": {"path": "some/model", "dtype": "bfloat16", "mb_spec": {"max_tokens_per_mb": 10240},
              "optimizer": {"type": "adam", "lr": 1e-5, "warmup_steps_proportion": 0.05}, "eps_clip": 0.4,
              "group_size": "${gconfig.n_samples}", "kl_ctl": 0.01, "ppo_n_minibatches": 1},
    "ref": {"path": "${actor.path}", "dtype": "${actor.dtype}", "mb_spec": {"max_tokens_per_mb": 1}},
    "sglang": {"model_path": "${actor.path}", "context_length": 32768, "dtype": "${actor.dtype}"},
    "train_dataset": {"batch_size": 256, "shuffle": True, "pin_memory": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)


def knobs(converted: Converted) -> dict[str, Any]:
    return {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(converted.overrides)}


def trl(command: str, **values: Any) -> Converted:
    Path("run.yaml").write_text(yaml.safe_dump({**TRL, **values}))
    return read_trl(command, "run.yaml", world=2)


def from_areal(**values: Any) -> Converted:
    Path("run.yaml").write_text(yaml.safe_dump({**AREAL, **values}))
    return read_areal("run.yaml")


@pytest.mark.parametrize("tables", [trl_keys.TABLES, verl_keys.TABLES, areal.TABLES], ids=["trl", "verl", "areal"])
def test_every_target_is_a_knob_and_no_key_is_in_two_tables(tables: Tables) -> None:
    known = cli.knob_paths()
    chosen = {choice[0] for options in tables.choices.values() for choice in options.values() if choice}
    targets = {*tables.knobs.values(), *chosen}
    assert {target for target in targets if target not in known and not target.startswith("sglang.")} == set()
    keys = [*tables.knobs, *tables.choices, *tables.needless]
    assert len(keys) == len(set(keys))


def test_trl_grpo_has_trls_defaults_and_batches() -> None:
    found = knobs(trl("grpo", per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=4))
    expected = {
        "method": "rl", "algorithm": "grpo", "algorithm.kl_coef": 0.0, "algorithm.aggregate": "token",
        "algorithm.eps_clip": 0.2, "rewards.functions": ["rewards.right"], "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 256, "train_dataset.batch_size": 4 * 4 * 2 // 4, "actor.optimizer.lr": 1e-5,
        "total_train_steps": 10, "actor.optimizer.lr_decay_style": "linear", "actor.path": "some/model",
    }  # fmt: skip
    assert {knob: found[knob] for knob in expected} == expected
    assert set(found) <= {*cli.knob_paths(), "algorithm"}


@pytest.mark.parametrize(
    ("command", "given_keys", "expected"),
    [
        ("grpo", {"epsilon_high": 0.28}, {"algorithm": "dapo", "algorithm.clip_high": 0.28}),
        ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"algorithm": "dr_grpo"}),
        ("grpo", {"importance_sampling_level": "sequence", "epsilon": 3e-4},
         {"algorithm": "gspo", "algorithm.aggregate": "token"}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [2.0]},
         {"algorithm": "gdpo", "algorithm.reward_weights": [2.0]}),
        ("rloo", {}, {"algorithm": "rloo", "algorithm.kl_coef": 0.05, "algorithm.kl_in": "reward",
                      "algorithm.kl_estimator": "k1", "gconfig.n_samples": 2}),
        ("dpo", {"reward_funcs": None, "beta": 0.3},
         {"method": "preference", "algorithm": "dpo", "algorithm.beta": 0.3}),
        ("dpo", {"reward_funcs": None, "loss_type": "ipo"}, {"algorithm": "ipo", "algorithm.beta": 0.1}),
        ("sft", {"reward_funcs": None, "max_steps": -1, "num_train_epochs": 2, "max_length": 64},
         {"method": "sft", "total_train_steps": 2 * (20 // 16), "train_dataset.max_length": 64}),
    ],
)  # fmt: skip
def test_trl_commands_and_variants(command: str, given_keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = knobs(trl(command, **given_keys))
    assert {knob: found.get(knob) for knob in expected} == expected


SEQUENCE_MASK = {"": "mask", "_level": "sequence", "_low": 0.0, "_high": 3.0}
UNCHANGED = dict.fromkeys(SEQUENCE_MASK)


@pytest.mark.parametrize(
    ("given_keys", "expected"),
    [
        ({}, UNCHANGED),
        ({"use_vllm": False, "vllm_importance_sampling_mode": "token_mask"}, UNCHANGED),
        ({"use_vllm": True}, SEQUENCE_MASK),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False, "vllm_importance_sampling_cap": 2.0},
         {**UNCHANGED, "": "none"}),
        ({"use_vllm": True, "vllm_importance_sampling_correction": None}, {**UNCHANGED, "": "none"}),
        ({"use_vllm": True, "vllm_importance_sampling_cap": 2.0, "vllm_importance_sampling_clip_max": 4.0},
         {**SEQUENCE_MASK, "_high": 2.0}),
        ({"use_vllm": True, "vllm_importance_sampling_clip_max": 0.4,
          "vllm_importance_sampling_mode": "token_truncate"},
         {"": "truncate", "_level": "token", "_low": 0.0, "_high": 0.4}),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"},
         {**SEQUENCE_MASK, "": "truncate"}),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None,
          "vllm_importance_sampling_clip_min": 0.5},
         {"": "mask", "_level": "token", "_low": 0.5, "_high": UNBOUNDED}),
    ],
)  # fmt: skip
def test_trl_weighs_what_vllm_samples(given_keys: dict[str, Any], expected: dict[str, Any]) -> None:
    converted = trl("grpo", **given_keys)
    found = knobs(converted)
    assert {end: found.get(f"algorithm.correction{end}") for end in expected} == expected
    assert {line.split()[0] for line in converted.table.splitlines()[1:]} >= set(given_keys)
    assert not any("read together" in line for line in converted.table.splitlines() if "vllm_importance" in line)


def test_trl_is_said_to_weigh_by_the_probability_after_top_p() -> None:
    rows = [line.split(maxsplit=2) for line in trl("grpo", use_vllm=True, top_p=0.9).table.splitlines()]
    notes = [text for key, _, text in rows if key == "top_p"]
    assert "algorithm.correction takes rollout probabilities before top_p, and TRL after it" in notes


def test_verl_has_its_layout_clip_and_kl() -> None:
    found = knobs(
        read_verl(
            [
                *VERL, "--config-name=ppo_megatron_trainer.yaml", f"{ACTOR}.use_kl_loss=True",
                f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.ppo_mini_batch_size=256",
                f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=4", "actor_rollout_ref.rollout.n=5",
                "trainer.n_gpus_per_node=8", "trainer.nnodes=2", "trainer.logger=['console','wandb']",
                "trainer.save_freq=-1", "trainer.test_freq=5", "actor_rollout_ref.model.use_remove_padding=True",
                f"{ACTOR}.optim.lr=1e-6",
            ]
        )
    )  # fmt: skip
    expected = {
        "method": "rl", "algorithm": "grpo", "algorithm.kl_coef": 0.01, "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": "k3", "algorithm.n_minibatches": 4, "parallel.tp_size": 2, "parallel.pp_size": 2,
        "parallel.dp_size": 4, "server.n_servers": 4, "server.tp_size": 4, "server.colocate": True,
        "gconfig.n_samples": 5, "cluster.gpus_per_node": 8, "saver.every_steps": 0, "evaluator.every_steps": 5,
        "logger.wandb": True, "logger.tensorboard": False, "train_dataset.max_length": 512,
        "train_dataset.sources": [{"path": "rows.jsonl", "split": "train", "type": "messages"}],
        "actor.optimizer.lr": 1e-6, "total_train_steps": 10,
    }  # fmt: skip
    assert {knob: found[knob] for knob in expected} == expected
    assert set(found) <= {*cli.knob_paths(), "algorithm"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["algorithm.adv_estimator=rloo"], {"algorithm": "rloo", "algorithm.eps_clip": None}),
        (["algorithm.adv_estimator=reinforce_plus_plus", f"{ACTOR}.clip_ratio=0.3"], {"algorithm.eps_clip": 0.3}),
        ([f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.1"], {"algorithm.eps_clip": 0.1}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"algorithm": "dr_grpo", "algorithm.aggregate": "token"}),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=64"],
         {"algorithm": "grpo", "algorithm.aggregate": "constant", "algorithm.aggregate_tokens": 64}),
        (["algorithm.use_kl_in_reward=True"], {"algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"}),
        (["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=mse", f"{ACTOR}.kl_loss_type=k3"],
         {"algorithm.kl_estimator": "k2"}),
        (["algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=True"],
         {"algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"}),
        (["algorithm.adv_estimator=gae"],
         {"critic_optimizer.lr": 1e-5, "critic_optimizer.weight_decay": 0.01, "algorithm.value_clip": 0.5,
          "algorithm.dual_clip": 3.0, "actor.optimizer.weight_decay": 0.01}),
        (["algorithm.adv_estimator=gae", "critic.optim.lr=2e-5", "critic.cliprange_value=0.3",
          f"{ACTOR}.clip_ratio_c=4"],
         {"critic_optimizer.lr": 2e-5, "algorithm.value_clip": 0.3, "algorithm.dual_clip": 4}),
        ([f"{ACTOR}.optim.weight_decay=0.1"], {"actor.optimizer.weight_decay": 0.1, "algorithm.dual_clip": None}),
    ],
)  # fmt: skip
def test_verls_clip_mean_and_kl_are_kept(keys: list[str], expected: dict[str, Any]) -> None:
    found = knobs(read_verl([*VERL, *keys]))
    assert {knob: found.get(knob) for knob in expected} == expected


def test_every_stated_dtype_and_batch_size_of_trl_has_a_row() -> None:
    table = trl("grpo", per_device_eval_batch_size=4, dtype="auto", torch_dtype="float32").table
    for row in ("per_device_eval_batch_size", "dtype", "torch_dtype"):
        assert any(line.split()[0] == row and "no change" in line for line in table.splitlines()), row


def test_areals_walk_through_is_read() -> None:
    found = knobs(from_areal())
    expected = {
        "algorithm": "grpo", "algorithm.eps_clip": 0.4, "algorithm.kl_coef": 0.01, "parallel.dp_size": 2,
        "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1",
        "parallel.tp_size": 2, "parallel.pp_size": 1, "server.n_servers": 4, "server.tp_size": 1,
        "rollout.max_head_offpolicyness": 4, "cluster.gpus_per_node": 8, "actor.optimizer.warmup_steps": 5,
        "sglang.context_length": 32768, "server.dtype": "bfloat16", "experiment_name": "gsm8k-grpo",
        "actor.max_tokens_per_mb": 10240, "train_dataset.batch_size": 256,
    }  # fmt: skip
    assert {knob: found[knob] for knob in expected} == expected
    assert knobs(from_areal(async_training=False))["rollout.max_head_offpolicyness"] == 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sglang:d4t2+fsdp:d8", {"server.n_servers": 4, "server.tp_size": 2, "parallel.dp_size": 8}),
        ("sglang[rollout]:d2+megatron[actor]:d2p2t2c2e2",
         {"server.n_servers": 2, "parallel.pp_size": 2, "parallel.cp_size": 2, "parallel.ep_size": 2}),
        ("d4p1t2", {"parallel.dp_size": 4, "parallel.tp_size": 2}),
        ("fsdp:d8", {"parallel.dp_size": 8}),
    ],
)  # fmt: skip
def test_allocation_modes_become_layouts(mode: str, expected: dict[str, Any]) -> None:
    found = knobs(from_areal(allocation_mode=mode))
    assert {knob: found[knob] for knob in expected} == expected


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: trl("grpo", reward_funcs=None), "reward_funcs: null  names no function; give MODULE.FUNCTION"),
        (lambda: trl("grpo", use_peft=True, lora_r=0), "lora_r: 0  must be a whole number of at least 1"),
        (lambda: trl("grpo", use_peft=True, use_dora=True), "use_dora: true  is not a supported key"),
        (
            lambda: trl("grpo", num_generation=4),
            "num_generation: 4  is not a supported key; did you mean num_generations",
        ),
        (lambda: trl("grpo", num_generations=5), "= 16 completions is not a multiple of num_generations=5"),
        (lambda: trl("grpo", loss_type="sapo"), "loss_type: sapo  is not one of grpo, bnpo, dapo"),
        (lambda: trl("kto"), "--from-trl kto does not exist"),
        (
            lambda: trl("grpo", use_vllm=True, vllm_importance_sampling_mode="token"),
            "vllm_importance_sampling_mode: token  is not one of token_truncate, token_mask, sequence_truncate,",
        ),
        (
            lambda: trl(
                "grpo",
                use_vllm=True,
                vllm_importance_sampling_mode="token_truncate",
                vllm_importance_sampling_clip_min=0.5,
            ),
            "vllm_importance_sampling_clip_min: 0.5  raises smaller weights, which algorithm.correction=truncate",
        ),
        (
            lambda: trl(
                "grpo",
                use_vllm=True,
                vllm_importance_sampling_mode="sequence_truncate",
                vllm_importance_sampling_clip_max=None,
            ),
            "vllm_importance_sampling_clip_max: null  leaves nothing to truncate",
        ),
        (lambda: read_verl([*VERL, "data.truncation=left"]), "data.truncation: left  is not one of error; prompts"),
        (lambda: read_verl([*VERL, "actor.optim.lr=1"]), "actor.optim.lr: 1  is not a supported key"),
        (lambda: read_verl([*VERL, "algorithm.adv_estimator=opo"]), "algorithm.adv_estimator: opo  is not one of gae"),
        (
            lambda: read_verl([*VERL, "actor_rollout_ref.rollout.do_sample=False"]),
            "actor_rollout_ref.rollout.do_sample: false  is not one of true; the policy is trained on what it samples",
        ),
        (
            lambda: read_verl([*VERL, "data.filter_overlong_prompts=False"]),
            "data.filter_overlong_prompts: false  is not one of true; longer prompts are always skipped",
        ),
        (
            lambda: from_areal(actor={**AREAL["actor"], "group_adv_norm": False}),
            "actor.group_adv_norm: false  is not one of true; GRPO normalises over the group",
        ),
        (
            lambda: from_areal(actor={**AREAL["actor"], "recompute_logprob": False}),
            "actor.recompute_logprob: false  is not one of true; the trainer's log-probs are always computed",
        ),
        (
            lambda: read_verl([*VERL, "algorithm.adv_estimator=rloo", f"{ACTOR}.clip_ratio=0.3"]),
            f"{ACTOR}.clip_ratio: 0.3  rloo has no clip",
        ),
        (lambda: read_verl(["a.py"]), "--from-verl takes KEY=VALUE as verl does, got a.py"),
        (lambda: from_areal(allocation_mode="sglang:d4|fsdp:d4"), "allocation_mode: sglang:d4|fsdp:d4  shares GPUs"),
        (lambda: from_areal(allocation_mode="sglang:q4+d4"), "is not SERVERS+TRAINER"),
        (lambda: from_areal(trail_name="x"), "trail_name: x  is not a supported key; did you mean trial_name?"),
        (lambda: from_areal(tokenizer_path="${gone.path}"), ": tokenizer_path: Interpolation key 'gone.path' not"),
    ],
)
def test_an_error_names_its_key(read: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        read()
    assert message in str(error.value)


def test_the_number_of_processes_is_laid_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(AREAL | {"allocation_mode": "sglang:d1+megatron:t2"}))
    arguments, _ = other_trainers.from_other_trainer(["--from-areal", "run.yaml", "--num-processes", "4", "seed=3"])
    assert arguments[-2:] == ["parallel.dp_size=2", "seed=3"]
    assert "as megarl reads it" in capsys.readouterr().out
    for given_arguments, message in (
        (["--from-areal", "run.yaml", "--num-processes=3"], "--num-processes 3 does not fit parallel.tp_size=2 of run"),
        (["--from-areal", "run.yaml", "--num-processes", "0"], "--num-processes 0 must be a number of trainer ranks"),
        (["--from-areal", "run.yaml", "--num-processes=4", "parallel.dp_size=2"], "are both given; leave one out"),
        (["--num-processes", "2"], "use parallel.dp_size"),
        (["--from-trl", "grpo"], "--from-trl needs the method and the path of a YAML file"),
        (["--from-areal", "run.yaml", "--from-trl", "grpo", "run.yaml"], "stands alone"),
    ):
        with pytest.raises(UserError) as error:
            other_trainers.from_other_trainer(given_arguments)
        assert message in str(error.value)


def test_areal_leaves_out_tokens_above_its_cap(tmp_path: Path) -> None:
    path = tmp_path / "areal.yaml"
    actor = {**AREAL["actor"], "use_decoupled_loss": True, "behav_imp_weight_cap": 2.0}
    path.write_text(yaml.safe_dump({**AREAL, "actor": actor}))
    found = knobs(read_areal(str(path)))
    assert (found["algorithm.correction"], found["algorithm.correction_high"]) == ("mask", 2.0)


def test_verls_keys_end_at_two_dashes() -> None:
    arguments, converted = other_trainers.from_other_trainer(
        ["--from-verl", *VERL, "trainer.n_gpus_per_node=0", "--", "seed=3"]
    )
    assert arguments[-1] == "seed=3"
    assert converted is not None
    assert converted.source == "the verl command line"


TEXTS = st.one_of(
    st.sampled_from(
        ["", "auto", "none", "sglang:d2+d2", "d0", "dr_grpo", "rows.jsonl", "['a','b']", "1e-5", "${x}", "'"]
    ),
    st.text(max_size=6),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.sampled_from([0.5, 2**64, 10**400]), st.floats(), TEXTS
)
VALUES = st.one_of(SCALARS, SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(TEXTS, SCALARS, max_size=2))


def names(tables: Tables) -> list[str]:
    return sorted({*tables.knobs, *tables.choices, *tables.needless, *tables.why_not, *tables.others})


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections, over AReaL's example."""
    tree: dict[str, Any] = yaml.safe_load(yaml.safe_dump(AREAL))
    for name, value in values.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            if not isinstance(inner.get(section), dict):
                inner[section] = {}
            inner = inner[section]
        inner[last] = value
    return tree


@fuzzed(bounded=150, long=20_000)
@pytest.mark.parametrize("trainer", ["trl", "verl", "areal"])
def test_random_settings_are_converted_or_refused_key_by_key(effort: Any, trainer: str) -> None:
    tables = {"trl": trl_keys.TABLES, "verl": verl_keys.TABLES, "areal": areal.TABLES}[trainer]
    changes = st.dictionaries(st.one_of(st.sampled_from(names(tables)), TEXTS), VALUES, max_size=4)

    @effort
    @given(changes, st.sampled_from(sorted(trl_keys.COMMANDS)))
    def holds(values: dict[str, Any], command: str) -> None:
        try:
            if trainer == "trl":
                Path("run.yaml").write_text(yaml.safe_dump({**TRL, **values}), encoding="utf-8")
                converted = read_trl(command, "run.yaml")
            elif trainer == "verl":
                converted = read_verl([*VERL, *(f"{key}={value}" for key, value in values.items())])
            else:
                Path("run.yaml").write_text(yaml.safe_dump(nested(values)), encoding="utf-8")
                converted = read_areal("run.yaml")
        except UserError as error:
            first, *refused = str(error).split("\n")
        else:
            assert OverridesParser.create().parse_overrides(converted.overrides)
            return
        assert not refused or first.endswith("has keys that megarl does not support:")
        assert all(line.startswith("  ") and ": " in line for line in refused)

    holds()


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (
            lambda: trl("grpo", use_peft=True),
            {"rank": "16", "alpha": "32", "dropout": "0.05", "targets": "['q_proj','v_proj']"},
        ),
        (
            lambda: trl("grpo", use_peft=True, lora_r=8, lora_target_modules="all-linear", use_rslora=True),
            {"rank": "8", "alpha": "32", "dropout": "0.05", "targets": "['all-linear']", "rslora": "true"},
        ),
        (
            lambda: trl("grpo", use_peft=True, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            {"rank": "16", "alpha": "32", "dropout": "0.05", "targets": "['q_proj','v_proj']", "quantization": "'nf4'"},
        ),
        (lambda: trl("grpo", lora_r=8), {}),
        (
            lambda: read_verl([*VERL, "actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora_alpha=64"]),
            {"rank": "32", "alpha": "64", "targets": "['all-linear']"},
        ),
        (lambda: read_verl([*VERL, "actor_rollout_ref.model.lora_rank=0"]), {}),
        (
            lambda: from_areal(actor={**AREAL["actor"], "use_lora": True, "lora_rank": 8, "target_modules": []}),
            {"rank": "8", "alpha": "16", "targets": "['all-linear']"},
        ),
        (lambda: from_areal(actor={**AREAL["actor"], "use_lora": False}), {}),
    ],
)
def test_adapters_become_knobs(read: Any, expected: dict[str, str]) -> None:
    overrides = read().overrides
    found = dict(item.removeprefix("actor.lora.").split("=", 1) for item in overrides if item.startswith("actor.lora."))
    assert found == expected
