import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.data.prompts import DatasetConfig, load_gsm8k, prompt_ids
from megarl.data.sft import get_gsm8k_sft_dataset, get_sft_dataset, question_and_answer
from megarl.data.templates import CHATML
from megarl.data.tokenizer import EOS
from megarl.knobs import UserError


def test_the_prompt_equals_the_rollout_prompt_and_loss_covers_the_answer_and_eos(tokenizer: Any) -> None:
    dataset = get_gsm8k_sft_dataset("arithmetic", "test", tokenizer)
    assert dataset.column_names == ["input_ids", "loss_mask"]
    for row, source in zip(dataset, load_gsm8k("arithmetic", "test"), strict=True):
        start = row["loss_mask"].index(1)
        assert row["input_ids"][:start] == prompt_ids(tokenizer, [{"role": "user", "content": source["question"]}])
        assert row["loss_mask"] == [0] * start + [1] * (len(row["input_ids"]) - start)
        assert tokenizer.decode(row["input_ids"][start:]) == source["answer"] + EOS


class Plain:
    """The bundled tokenizer without its chat template."""

    chat_template = None

    def __init__(self, tokenizer: Any):
        self.eos_token_id, self.encode = tokenizer.eos_token_id, tokenizer.encode


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(question=st.text(max_size=20), answer=st.text(max_size=20))
def test_no_token_spans_prompt_and_answer(question: str, answer: str, tokenizer: Any) -> None:
    for variant in (tokenizer, Plain(tokenizer)):
        tokens = question_and_answer(variant, question, answer)
        start = tokens["loss_mask"].index(1)
        assert tokenizer.decode(tokens["input_ids"][start:]) == answer + EOS
        prompt = f"<|user|>{question}<|assistant|>" if variant is tokenizer else question
        assert tokenizer.decode(tokens["input_ids"][:start]) == prompt


def test_sequences_over_the_limit_are_dropped_and_listed(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "1+1?", "answer": "1+1=2\n" * 9 + "#### 2"}]
    Dataset.from_list(rows).to_json(tmp_path / "train.jsonl")
    lengths = [len(r["input_ids"]) for r in get_gsm8k_sft_dataset(str(tmp_path), "train", tokenizer)]
    with caplog.at_level(logging.WARNING, logger="megarl"):
        kept = get_gsm8k_sft_dataset(str(tmp_path), "train", tokenizer, max_length=lengths[1] - 1)
    assert [len(r["input_ids"]) for r in kept] == lengths[:1]
    assert f"1 of 2 sequences over max_length {lengths[1] - 1} were skipped: row 1 ({lengths[1]} tokens)" in caplog.text
    with pytest.raises(UserError, match="all 2 sequences"):
        get_gsm8k_sft_dataset(str(tmp_path), "train", tokenizer, max_length=2)


@pytest.mark.parametrize("kind", ["gsm8k", "messages"])  # samples go the way of messages
def test_a_cache_is_of_one_tokenizer(kind: str, tokenizer: Any, chatml_tokenizer: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    Dataset.from_list([{"question": "1+1?", "answer": "#### 2", "messages": chat}]).to_json(tmp_path / "train.jsonl")
    chatml_tokenizer.chat_template = CHATML.jinja()
    config = DatasetConfig(path=str(tmp_path), type=kind, split="train")
    texts = []
    for one in (tokenizer, chatml_tokenizer, tokenizer):
        ids = get_sft_dataset(config, one)[0]["input_ids"]
        texts.append(one.decode(ids))
        assert ids[-1] == one.eos_token_id or kind == "messages"
    assert texts[0] == texts[2] != texts[1]
    assert "<|im_start|>user" in texts[1]


def test_a_cache_is_of_one_instruction(tokenizer: Any, tmp_path: Path) -> None:
    Dataset.from_list([{"question": "1+1?", "answer": "#### 2"}]).to_json(tmp_path / "train.jsonl")
    for instruction in ("", " Think first.", " Be brief."):
        row = get_gsm8k_sft_dataset(str(tmp_path), "train", tokenizer, instruction=instruction)[0]
        assert f"1+1?{instruction}<|assistant|>" in tokenizer.decode(row["input_ids"])


def test_a_sequence_of_exactly_the_limit_stays_and_is_not_listed(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": "1+1?", "answer": "#### 2" + "2" * i} for i in range(3)]
    Dataset.from_list(rows).to_json(tmp_path / "train.jsonl")
    first, second, third = (len(r["input_ids"]) for r in get_gsm8k_sft_dataset(str(tmp_path), "train", tokenizer))
    assert first < second < third
    with caplog.at_level(logging.WARNING, logger="megarl"):
        kept = get_gsm8k_sft_dataset(str(tmp_path), "train", tokenizer, max_length=second)
    assert [len(r["input_ids"]) for r in kept] == [first, second]
    assert f"1 of 3 sequences over max_length {second} were skipped: row 2 ({third} tokens)" in caplog.text


def test_a_tokenizer_without_eos_is_refused() -> None:
    with pytest.raises(UserError, match="eos"):
        get_gsm8k_sft_dataset("arithmetic", "test", SimpleNamespace(eos_token_id=None))
