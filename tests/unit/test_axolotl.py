from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from megarl import cli, other_trainers
from megarl.axolotl import keys
from megarl.axolotl.read import read_axolotl
from megarl.knobs import UserError
from tests.exit_codes import exit_code, reads_its_configuration

BASE = {"base_model": "some/model", "learning_rate": "1e-5", "micro_batch_size": 2, "max_steps": 50}
PAIRS = [{"path": "Intel/orca_dpo_pairs", "split": "train", "type": "chatml.intel"}]
REWARD = {"reward_funcs": ["rewards.right"]}
GSM8K = [{"path": "openai/gsm8k", "name": "main", "type": "rewards.to_prompt"}]


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def read(values: dict[str, Any], **sizes: Any) -> tuple[dict[str, Any], str]:
    """Returns the overrides, parsed by Hydra, and the table."""
    Path("run.yaml").write_text(yaml.safe_dump(values))
    converted = read_axolotl("run.yaml", **sizes)
    parsed = OverridesParser.create().parse_overrides(converted.overrides)
    return {override.key_or_group: override.value() for override in parsed}, converted.table


def refusals(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        read(values)
    return str(caught.value)


def targets() -> set[str]:
    """Collects every knob that the tables name."""
    chosen = {choice[0] for options in keys.CHOICES.values() for choice in options.values() if choice}
    of_algorithms = {knob for _, _, table in keys.ALGORITHMS.values() for knob, _ in table.values()}
    return {*keys.KNOBS.values(), *chosen, *of_algorithms}


def test_every_target_is_a_knob() -> None:
    known = cli.knob_paths()
    assert {target for target in targets() if target not in known and not target.startswith("sglang.")} == set()


def test_no_key_is_in_two_tables() -> None:
    tables = [keys.KNOBS, keys.CHOICES, keys.NEEDLESS]
    assert sum(map(len, tables)) == len({key for table in tables for key in table})


@pytest.mark.parametrize(
    ("rl", "given", "knobs"),
    [
        ("dpo", {"rl_beta": 0.3}, {"algorithm.beta": 0.3, "algorithm.label_smoothing": 0.0}),
        ("dpo", {"trl": {"beta": 0.2}, "rl_beta": 0.3}, {"algorithm.beta": 0.2}),
        ("ipo", {}, {"algorithm.beta": 0.1}),
        ("orpo", {"orpo_alpha": 0.2}, {"algorithm.alpha": 0.2}),
        ("simpo", {"rl_beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 1.4},
         {"algorithm.beta": 2.0, "algorithm.cpo_alpha": 0.0, "algorithm.gamma": 1.4}),
        ("simpo", {}, {"algorithm.beta": 0.1, "algorithm.cpo_alpha": 1.0, "algorithm.gamma": 0.5}),
    ],
)  # fmt: skip
def test_offline_methods_take_their_knobs_and_axolotls_defaults(
    rl: str, given: dict[str, Any], knobs: dict[str, Any]
) -> None:
    overrides, table = read({**BASE, "rl": rl, "datasets": PAIRS, **given})
    assert (overrides["method"], overrides["algorithm"]) == ("preference", rl)
    assert {knob: overrides[knob] for knob in knobs} == knobs
    assert f"algorithm={rl}" in table
    if not given:
        assert "(its default)" in table


def test_kto_with_custom_fields_and_formats() -> None:
    kind = {"field_prompt": "q", "prompt_format": 'Q: it\'s {prompt}\n"A":', "completion_format": " {completion}"}
    overrides, _ = read(
        {
            **BASE, "rl": "kto", "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5,
            "datasets": [{"ds_type": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train", "type": kind}],
        }
    )  # fmt: skip
    assert overrides["algorithm.desirable_weight"] == 1.5
    assert overrides["algorithm.undesirable_weight"] == 0.5
    source = {"split": "train", "type": "user_defined.default", "options": kind}
    assert overrides["train_dataset.sources"] == [{"path": "a.jsonl", **source}, {"path": "b.jsonl", **source}]
    assert overrides["evaluator.at_end"] is False


def test_grpo_with_a_server_rewards_and_a_transform() -> None:
    overrides, table = read(
        {
            **BASE, "rl": "grpo", "gradient_accumulation_steps": 4, "context_parallel_size": 2, "datasets": GSM8K,
            "gradient_checkpointing": True, "bf16": True, "max_prompt_len": 128,
            "vllm": {"host": "0.0.0.0", "port": 8000, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.85,
                     "dtype": "auto", "max_model_len": 2048},
            "trl": {"beta": 0.001, "max_completion_length": 256, "use_vllm": True, "num_generations": 4,
                    "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000, "vllm_server_timeout": 300,
                    "reward_funcs": ["rewards.right", "rewards.short"], "reward_weights": [1.0, 2.0],
                    "rollout_func": "env.solve"},
        },
        world=8,
    )  # fmt: skip
    expected = {
        "method": "rl", "algorithm": "grpo", "algorithm.kl_coef": 0.001, "algorithm.aggregate": "token",
        "gconfig.max_new_tokens": 256, "gconfig.n_samples": 4, "rewards.functions": ["rewards.right", "rewards.short"],
        "rewards.weights": [1.0, 2.0], "rollout.rollout_func": "env.solve",
        "server.host": "127.0.0.1", "server.port": 8000, "server.tp_size": 2,
        "server.dtype": "bfloat16", "server.ready_timeout_s": 300, "sglang.mem_fraction_static": 0.85,
        "sglang.context_length": 2048, "parallel.cp_size": 2, "actor.recompute": "full", "actor.dtype": "bfloat16",
        "actor.path": "some/model", "actor.optimizer.lr": 1e-5, "actor.optimizer.lr_decay_style": "cosine",
        "train_dataset.max_length": 128, "actor.max_tokens_per_mb": 2 * (128 + 256),
        "train_dataset.batch_size": 2 * 4 * (8 // 2) // 4, "total_train_steps": 50, "actor.optimizer.warmup_steps": 1,
        "train_dataset.sources": [{**GSM8K[0], "split": "train"}],
    }  # fmt: skip
    assert {knob: overrides[knob] for knob in expected} == expected
    for key in ("trl.use_vllm", "vllm.port", "context_parallel_size", "max_steps", "datasets[0]", "lr_scheduler"):
        assert any(line.strip().startswith(key) for line in table.splitlines()), key


@pytest.mark.parametrize(
    ("rl", "trl", "algorithm", "knobs"),
    [
        ("grpo", {"loss_type": "grpo"}, "grpo", {"algorithm.aggregate": "sequence", "algorithm.eps_clip": 0.2}),
        ("grpo", {"loss_type": "dr_grpo"}, "dr_grpo", {"algorithm.aggregate_tokens": 256}),
        ("grpo", {"loss_type": "grpo", "scale_rewards": False}, "dr_grpo", {"algorithm.aggregate": "sequence"}),
        ("grpo", {"epsilon": 0.1, "epsilon_high": 0.3}, "dapo",
         {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.3, "algorithm.dynamic_sampling": False}),
        ("grpo", {"importance_sampling_level": "sequence", "epsilon": 3e-4}, "gspo",
         {"algorithm.clip_low": 3e-4, "algorithm.clip_high": 3e-4}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 2.0]}, "gdpo",
         {"algorithm.reward_weights": [1.0, 2.0]}),
        ("gdpo", {"beta": 0.01, "temperature": 0.7}, "gdpo",
         {"algorithm.kl_coef": 0.01, "gconfig.temperature": 0.7, "actor.temperature": 0.7}),
    ],
)  # fmt: skip
def test_variants_of_grpo_map_to_their_algorithm(
    rl: str, trl: dict[str, Any], algorithm: str, knobs: dict[str, Any]
) -> None:
    overrides, _ = read({**BASE, "rl": rl, "datasets": GSM8K, "trl": {**REWARD, "num_generations": 2, **trl}})
    assert overrides["algorithm"] == algorithm
    assert {knob: overrides.get(knob) for knob in knobs} == knobs
    known = cli.knob_paths()
    assert {k for k in overrides if k.startswith("algorithm.")} <= set(known)


@pytest.mark.parametrize(("stated", "steps"), [(0.1, 2), (3, 3), (3.0, 3), (0, 0)])
def test_steps_below_1_are_a_share_of_all_steps(stated: float, steps: int) -> None:
    given = {"warmup_steps": stated, "save_steps": stated, "max_steps": 20.0}
    overrides, _ = read({**BASE, "rl": "dpo", "datasets": PAIRS, **given})
    assert overrides["total_train_steps"] == 20
    assert overrides["actor.optimizer.warmup_steps"] == steps
    assert overrides["saver.every_steps"] == (steps or 1)


def test_epochs_are_counted_from_the_data_and_a_part_is_held_out() -> None:
    data = [{"path": "arithmetic_pairs", "type": "chat_template"}]
    overrides, table = read(
        {
            "base_model": "m", "rl": "dpo", "datasets": data, "learning_rate": 1e-4, "micro_batch_size": 4,
            "num_epochs": 2, "val_set_size": 0.25, "warmup_ratio": 0.1, "saves_per_epoch": 2, "eval_steps": 0.5,
            "dp_shard_size": 2, "sequence_len": 64, "save_total_limit": 3, "lr_scheduler": "linear",
        }
    )  # fmt: skip
    per_epoch = 2048 * 3 // 4 // 8
    source = {"path": "arithmetic_pairs", "type": "chat_template.default"}
    expected = {
        "total_train_steps": 2 * per_epoch, "actor.optimizer.warmup_steps": int(0.1 * 2 * per_epoch),
        "saver.every_steps": per_epoch // 2, "evaluator.every_steps": per_epoch, "parallel.dp_size": 2,
        "train_dataset.batch_size": 8, "train_dataset.max_length": 64, "actor.max_tokens_per_mb": 2 * 4 * 64,
        "train_dataset.sources": [{**source, "split": "train[:75%]"}],
        "valid_dataset.sources": [{**source, "split": "train[75%:]"}],
    }  # fmt: skip
    assert {knob: overrides[knob] for knob in expected} == expected
    assert "evaluator.at_end" not in overrides
    assert f"2 x {per_epoch} batches" in table


@pytest.mark.parametrize(("times", "steps"), [(1e-308, 10**9), (5e-324, 10**9), (0.5, 2 * 2048 // 8), (1e9, 1), (0, 0)])
def test_any_number_of_saves_in_an_epoch_is_a_number_of_steps(times: float, steps: int) -> None:
    data = [{"path": "arithmetic_pairs", "type": "chat_template"}]
    values = {"base_model": "m", "rl": "dpo", "datasets": data, "learning_rate": 1e-4, "micro_batch_size": 8}
    assert read({**values, "saves_per_epoch": times})[0]["saver.every_steps"] == steps


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ({"chat_template": "chatml"}, "chatml"),
        ({"chat_template": "jinja", "chat_template_jinja": "{{ messages[0].role }}"}, "{{ messages[0].role }}"),
        ({"chat_template": "tokenizer_default"}, None),
        ({"datasets": [{**PAIRS[0], "chat_template": "llama3"}]}, "llama3"),
    ],
)  # fmt: skip
def test_a_chat_template_is_taken_over(given: dict[str, Any], template: str | None) -> None:
    overrides, _ = read({**BASE, "rl": "orpo", "datasets": PAIRS, **given})
    assert overrides.get("data.chat_template") == template


def test_all_unsupported_keys_are_listed_at_once_one_per_line() -> None:
    message = refusals(
        {
            **BASE, "rl": "grpo", "adapter": "qlora", "load_in_4bit": False, "gptq": True, "deepspeed": "z3",
            "lr_schedular": "cosine", "optimizer": "adamw_8bit", "lr_scheduler": "one_cycle",
            "chat_template": "gemma", "micro_batch_size": 0, "rl_adapter_ref_model": True,
            "gradient_checkpointing": "offload",
            "trl": {**REWARD, "use_liger_kernel": True, "num_generations": 5, "num_iterations": 2,
                    "vllm_mode": "colocate"},
            "vllm": {"host": "10.0.0.1"},
            "datasets": [{**GSM8K[0], "shards": 4}, {"path": "a", "type": "chatml"}],
        }
    )  # fmt: skip
    lines = [line.removeprefix("  ").split(": ") for line in message.splitlines()[1:]]
    lines = [parts[parts[0].startswith("run.yaml:")] for parts in lines]
    assert sorted(lines) == sorted(
        [
            "adapter", "gptq", "lora_r", "lora_target_modules", "deepspeed", "lr_schedular", "optimizer",
            "lr_scheduler",
            "chat_template", "micro_batch_size", "micro_batch_size", "gradient_checkpointing",
            "trl.use_liger_kernel", "trl.num_iterations", "trl.vllm_mode", "vllm.host", "datasets[0].shards",
            "datasets[1].type",
        ]
    )  # fmt: skip
    assert "lr_schedular: cosine  is not a supported key; did you mean lr_scheduler?" in message
    assert "adamw_torch" in message
    assert "adapter: qlora  has a base of 4 bits; add load_in_4bit: true, or set adapter: lora" in message
    assert "5" in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rl": "dpo", "datasets": [{"path": "a", "type": "chatml.intl"}]},
            "is not a format of pairs; choose from chatml",
        ),
        ({"rl": "kto", "datasets": [{"path": "a", "type": "zephyr.nectar"}]}, "is not a format of KTO; choose from"),
        ({"rl": "dpo", "datasets": [{"path": "a", "type": {"field_prompts": "q"}}]}, "field_prompts is not an option"),
        ({"rl": "dpo"}, "datasets: null  no data set is given"),
        ({"rl": "dpo", "datasets": PAIRS, "val_set_size": 1.5}, "val_set_size: 1.5  must be a fraction below 1"),
        ({"rl": "dpo", "datasets": PAIRS, "max_prompt_len": 5}, "max_prompt_len: 5  prompts are never cut"),
        ({"rl": "dpo", "datasets": PAIRS, "micro_batch_size": 2.5}, "micro_batch_size: 2.5  must be a whole number"),
        ({"rl": "dpo", "datasets": PAIRS, "max_steps": 9.5}, "max_steps: 9.5  must be a whole number"),
        ({"rl": "dpo", "datasets": PAIRS, "max_steps": 9, "warmup_steps": 1.5}, "warmup_steps: 1.5  must be a whole"),
        ({"rl": "dpo", "datasets": PAIRS, "max_steps": 9, "save_steps": 1.5}, "save_steps: 1.5  must be a whole"),
        ({"rl": "ebft", "datasets": PAIRS}, "rl: ebft is not one of dpo, ipo, kto, orpo, simpo, grpo, gdpo"),
        ({"datasets": PAIRS}, "rl: null is not one of"),
        ({"rl": "grpo", "datasets": GSM8K}, "trl.reward_funcs: null  names no function; give MODULE.FUNCTION"),
        ({"rl": "gdpo", "datasets": GSM8K, "trl": {"reward_funcs": []}}, "trl.reward_funcs: []  names no function"),
        ({"rl": "dpo", "datasets": PAIRS, "lora_r": 8}, "lora_r: 8  there is no adapter: lora, and all weights"),
        ({"rl": "dpo", "datasets": PAIRS, "adapter": "lora"}, "lora_r: null  must be a whole number of at least 1"),
        (
            {"rl": "dpo", "datasets": PAIRS, "adapter": "lora", "lora_r": 8},
            "lora_target_modules: null  names no layer; give names such as q_proj",
        ),
        (
            {"rl": "dpo", "datasets": PAIRS, "adapter": "lora", "lora_r": 8, "peft_use_dora": True},
            "peft_use_dora: true  has no counterpart in actor.lora",
        ),
    ],
)
def test_an_error_names_its_key(values: dict[str, Any], message: str) -> None:
    assert message in refusals({**BASE, **values})


def test_refused_keys_stand_with_their_lines_and_false_is_off_for_known_ones_alone() -> None:
    Path("run.yaml").write_text(
        "rl: dpo\nbase_model: m\ntf32: false\ntf23: false\nwandb_entity:\ndatasets:\n"
        "  - path: a\n    type: chatml.intl\n    shards: 4\nmicro_batch_size: many\n"
    )
    with pytest.raises(UserError) as error:
        read_axolotl("run.yaml")
    lines = str(error.value).splitlines()[1:]
    for line in (
        "  run.yaml:4: tf23: false  is not a supported key",
        "  run.yaml:9: datasets[0].shards: 4  is not supported in a data set",
        "  run.yaml:10: micro_batch_size: many  must be a number from 1",
    ):
        assert any(told.startswith(line) for told in lines), line
    assert any(told.startswith("  run.yaml:8: datasets[0].type: chatml.intl  type 'chatml.intl'") for told in lines)
    assert not any("tf32: false" in told or "wandb_entity" in told for told in lines)


def test_a_file_that_cannot_be_read_is_named() -> None:
    Path("list.yaml").write_text("- 1")
    Path("broken.yaml").write_text("a: [1")
    Path("date.yaml").write_text("rl: dpo\nlist:\n- [2001-01-01, 2001-99-99]\n")
    Path("bool.yaml").write_text("rl: dpo\nkey: !!bool x\n")
    Path("self.yaml").write_text("rl: dpo\nkey: &x {inner: [*x]}\n")
    Path("twice.yaml").write_text("rl: dpo\nrl: kto\n")
    for name, message in (
        ("no.yaml", "No such file"),
        ("list.yaml", "is a mapping"),
        ("broken.yaml", "this is no YAML: "),
        ("date.yaml", "3: this is no YAML: month must be in 1..12"),
        ("bool.yaml", "2: this is no YAML: 'x'"),
        ("self.yaml", "2: an alias refers to the value that it stands in"),
        ("twice.yaml", "2: rl is given twice, first in line 1; leave one out"),
    ):
        with pytest.raises(UserError, match=f"{name}.*{message}"):
            read_axolotl(name)


def test_the_command_prints_the_table_and_later_arguments_win(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.yaml").write_text(yaml.safe_dump({**BASE, "rl": "dpo", "datasets": PAIRS}))
    given = ["--from-axolotl", "run.yaml", "total_train_steps=7", "parallel.dp_size=4"]
    arguments, _ = other_trainers.from_other_trainer(given)
    assert arguments[-2:] == ["total_train_steps=7", "parallel.dp_size=4"]
    assert "train_dataset.batch_size=8" in arguments
    assert "run.yaml, as megarl reads it:" in capsys.readouterr().out
    assert other_trainers.from_other_trainer(["+experiment=x"]) == (["+experiment=x"], None)
    assert exit_code(reads_its_configuration, ["--from-axolotl"], monkeypatch) == 2
    assert "needs the path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rl", "changed", "message"),
    [
        ("gdpo", {"scale_rewards": False}, "trl.scale_rewards: false  is not one of true"),
        ("grpo", {"scale_rewards": False, "epsilon_high": 0.3}, "trl.scale_rewards: false  is not one of true"),
        ("grpo", {"scale_rewards": True, "loss_type": "dr_grpo"}, "trl.scale_rewards: true  is not false"),
    ],
)
def test_scaled_advantages_that_cannot_be_had_are_refused(rl: str, changed: dict[str, Any], message: str) -> None:
    assert message in refusals({**BASE, "rl": rl, "datasets": GSM8K, "trl": {**REWARD, **changed}})


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ({"lora_target_linear": True}, "['all-linear']"),
        ({"lora_target_modules": ["q_proj", "up_proj"]}, "['q_proj','up_proj']"),
    ],
)
def test_adapters_are_read(targets: dict[str, Any], expected: str) -> None:
    """Seed 004 begins with them."""
    keys = {
        "adapter": "lora", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "peft_use_rslora": True,
        "lora_model_dir": "before", "rl_adapter_ref_model": True, "load_in_8bit": False, **targets,
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump({**BASE, "rl": "dpo", "datasets": PAIRS, **keys}))
    converted = read_axolotl("run.yaml")
    knobs = dict(item.split("=", 1) for item in converted.overrides if item.startswith("actor.lora."))
    assert knobs == {
        "actor.lora.rank": "16", "actor.lora.alpha": "32", "actor.lora.dropout": "0.05", "actor.lora.rslora": "true",
        "actor.lora.path": "'before'", "actor.lora.targets": expected,
    }  # fmt: skip
    assert "the reference is the base, without the adapters" in converted.table


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"adapter": "qlora", "load_in_4bit": True}, "nf4"),
        ({"adapter": "lora", "load_in_8bit": True}, "blockwise8"),
        ({"adapter": "lora", "load_in_4bit": False}, None),
    ],
)
def test_a_base_in_few_bits_is_read(keys: dict[str, Any], expected: str | None) -> None:
    overrides, _ = read({**BASE, "rl": "dpo", "datasets": PAIRS, "lora_r": 4, "lora_target_linear": True, **keys})
    assert overrides.get("actor.lora.quantization") == expected


def test_a_base_is_in_4_bits_or_in_8() -> None:
    both = {"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": True, "lora_r": 4, "lora_target_linear": True}
    assert "load_in_4bit: true  and load_in_8bit: true exclude each other" in refusals(
        {**BASE, "rl": "dpo", "datasets": PAIRS, **both}
    )
