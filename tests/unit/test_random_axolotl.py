"""Random axolotl YAML files: `--from-axolotl` converts them into a command line, or refuses each bad key by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from megarl.axolotl import keys
from megarl.axolotl.read import read_axolotl
from megarl.knobs import UserError
from tests.fuzzing import fuzzed

ROWS = '{"question": "2+2", "answer": "#### 4"}\n' * 20
TEXTS = st.one_of(
    st.sampled_from(
        ["", " ", "1e-5", "-", "nan", "9" * 400, "no", "auto", "epoch", "steps", "é", "\n", "a'b\\", "${x}", "{prompt}",
         "{", "rewards.to_prompt", "chatml.intel", "rows.jsonl", "train[:5]", "train[", "dr_grpo", "sequence", "\0"]
    ),
    st.text(max_size=6),
)  # fmt: skip
NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([0.5, 2**64, 10**400, 1e300, 0.0]), st.floats())
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, NUMBERS, TEXTS)
VALUES = st.one_of(
    SCALARS,
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.one_of(TEXTS, st.integers(0, 2), st.none()), SCALARS, max_size=2),
    st.just([[{"a": [1]}]]),
)
OF_A_SOURCE = (
    "path", "name", "split", "type", "data_files", "ds_type", "chat_template", "chat_template_jinja",
    "message_field_role", "message_field_content", *keys.DATASET_OPTIONS,
)  # fmt: skip
GOOD_SOURCES = [
    {"path": "rows.jsonl", "type": "chatml.intel"},
    {"path": "rows.jsonl", "type": "rewards.to_prompt"},
    {"path": "rows.jsonl", "type": {"prompt_format": "{prompt}"}},
    {"path": "json", "data_files": ["rows.jsonl"], "type": "chat_template"},
]
OTHERS = (
    "datasets", "test_datasets", "val_set_size", "micro_batch_size", "gradient_accumulation_steps", "dp_shard_size",
    "dp_replicate_size", "sequence_len", "max_prompt_len", "num_epochs", "max_steps", "warmup_ratio", "warmup_steps",
    "save_steps", "saves_per_epoch", "eval_steps", "evals_per_epoch", "bf16", "bfloat16", "tokenizer_config",
    "chat_template", "chat_template_jinja", "trl.loss_type", "trl.epsilon", "trl.epsilon_high", "trl.temperature",
    "trl.max_completion_length", "trl.generation_batch_size", "trl.reward_weights", "trl", "vllm", "rl",
)  # fmt: skip
NAMES = sorted(
    {*OTHERS, *keys.KNOBS, *keys.CHOICES, *keys.NEEDLESS, *keys.WHY_NOT}
    | {key for _, _, table in keys.ALGORITHMS.values() for key in table}
)
CHOSEN = {key: list(options) for key, options in keys.CHOICES.items()}


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[Any, Any]:
    """A run that converts, after up to four random changes of its keys or of its data set's."""
    source: dict[Any, Any] = dict(draw(st.sampled_from(GOOD_SOURCES)))
    values: dict[Any, Any] = {
        "rl": draw(st.sampled_from(sorted(keys.ALGORITHMS))),
        "base_model": "some/model",
        "micro_batch_size": 8,
        "max_steps": draw(st.sampled_from([50, 0])),
        "datasets": [source],
        "trl": {"reward_funcs": ["rewards.f"]},
    }
    if draw(st.integers(0, 4)) == 0:
        source[draw(st.sampled_from(OF_A_SOURCE))] = draw(VALUES)
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.one_of(st.sampled_from(NAMES), st.sampled_from(OTHERS), TEXTS))
        value = draw(st.one_of(st.sampled_from(CHOSEN[name]), VALUES) if name in CHOSEN else VALUES)
        section, dot, inner = name.partition(".")
        if dot and section in ("trl", "vllm") and isinstance(values.setdefault(section, {}), dict):
            values[section][inner] = value
        else:
            values[name] = value
    return values


@fuzzed(bounded=400, long=20_000)
def test_random_settings_are_converted_or_refused_key_by_key(
    effort: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @effort
    @given(settings_of_a_run(), st.sampled_from([1, 8]))
    def holds(values: dict[Any, Any], world: int) -> None:
        Path("run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        try:
            converted = read_axolotl("run.yaml", world=world)
        except UserError as error:
            first, *refused = str(error).split("\n")
        else:
            assert OverridesParser.create().parse_overrides(converted.overrides)
            return
        assert not refused or first == "run.yaml has keys that megarl does not support:"
        assert all(line.startswith("  ") and ": " in line for line in refused)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)
    holds()


@fuzzed(bounded=200, long=20_000)
def test_a_file_of_random_text_is_refused_in_one_line(
    effort: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = st.sampled_from(
        ["rl", ": ", "\n", "- ", "  ", "{", "}", "[" * 400, "]", "&a ", "*a", "!!python/object:os.system ", "<<: ",
         "2001-01-01", "\t", "? ", "| ", "'", '"', "dpo", "datasets", "!!binary ", "!!bool ", "2001-99-99", "0x", "1:2"]
    )  # fmt: skip

    @effort
    @given(st.one_of(st.lists(pieces, max_size=8).map(lambda parts: "".join(parts).encode()), st.binary(max_size=8)))
    def holds(content: bytes) -> None:
        Path("run.yaml").write_bytes(content)
        with pytest.raises(UserError) as error:
            read_axolotl("run.yaml")
        assert "run.yaml" in str(error.value).splitlines()[0]

    monkeypatch.chdir(tmp_path)
    holds()
