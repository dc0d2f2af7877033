import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from megarl.data.arithmetic import generate
from megarl.data.prompts import prompt_ids
from megarl.data.tokenizer import EOS, PAD, ROLES, VOCAB_SIZE, check_vocabulary, train_tokenizer, write_tokenizer
from megarl.knobs import UserError

TINY = Path(__file__).parents[3] / "assets" / "tiny"
FRESH = train_tokenizer()


def test_the_bundled_files_equal_a_fresh_run_byte_for_byte(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    names = sorted(f.name for f in tmp_path.iterdir())
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(names)
    for name in names:
        assert (TINY / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_the_bundled_config_belongs_to_the_tokenizer() -> None:
    config, tokenizer = AutoConfig.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.vocab_size == len(tokenizer) == VOCAB_SIZE
    assert config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(EOS)
    assert config.pad_token_id == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids(PAD)
    generation = json.loads((TINY / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (config.eos_token_id, config.pad_token_id)
    check_vocabulary(tokenizer, config.vocab_size, str(TINY))


@given(st.text(max_size=60))
def test_decoding_restores_every_text(text: str) -> None:
    assert FRESH.decode(FRESH.encode(text)) == text


def test_the_folder_loads_as_the_same_tokenizer() -> None:
    loaded = AutoTokenizer.from_pretrained(TINY)
    for row in generate("test")[:50]:
        assert loaded.encode(row["question"]) == FRESH.encode(row["question"])
        assert loaded.encode(row["answer"]) == FRESH.encode(row["answer"])


def test_every_digit_is_a_separate_token() -> None:
    assert not [t for t in FRESH.get_vocab() if re.search(r"\d", t) and len(t) > 1]
    assert [FRESH.decode([i]) for i in FRESH.encode("12+9=21\n#### 21")] == [*"12+9=21", "\n#### ", "2", "1"]


def test_prompts_and_answers_are_short() -> None:
    for row in generate("train")[:2000]:
        assert len(prompt_ids(FRESH, [{"role": "user", "content": row["question"]}])) <= 25
        assert len(FRESH.encode(row["answer"])) + 1 <= 19


def test_the_chat_template_marks_each_turn() -> None:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "1+2?"},
    ]
    text = FRESH.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<|system|>Add.<|user|>1+1?<|assistant|>2{EOS}<|user|>1+2?<|assistant|>"
    roles = [t for t in FRESH.tokenize(text) if t in ROLES]
    assert roles == ["<|system|>", "<|user|>", "<|assistant|>", "<|user|>", "<|assistant|>"]
    with pytest.raises(Exception, match="unknown role tool"):
        FRESH.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


@pytest.mark.parametrize(("vocab_size", "fits"), [(VOCAB_SIZE - 1, False), (VOCAB_SIZE, True), (VOCAB_SIZE + 27, True)])
def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(vocab_size: int, fits: bool, tokenizer: Any) -> None:
    if fits:
        check_vocabulary(tokenizer, vocab_size, "some/model")
        return
    with pytest.raises(UserError, match=rf"up to {VOCAB_SIZE - 1}.*some/model.*{vocab_size}"):
        check_vocabulary(tokenizer, vocab_size, "some/model")


def test_added_tokens_count_in_the_vocabulary_check() -> None:
    tokenizer = train_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match=str(VOCAB_SIZE)):
        check_vocabulary(tokenizer, VOCAB_SIZE, "m")
