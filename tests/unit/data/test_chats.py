import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.collate import Batches, pad_sequences_to_tensors
from megarl.data.config import DatasetConfig, SourceConfig
from megarl.data.prompts import get_rl_dataset
from megarl.data.sft import get_gsm8k_sft_dataset, get_sft_dataset
from megarl.data.templates import CHATML, LLAMA3, chat_ids, set_chat_template
from megarl.knobs import UserError

CHAT = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 1?"},
    {"role": "assistant", "content": "6\n"},
]


def write(folder: Path, rows: list[Any]) -> str:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


def trained(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    return tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on])


def test_loss_covers_only_the_assistant_turns_and_their_ends(tokenizer: Any) -> None:
    ids, mask = chat_ids(tokenizer, CHAT)
    assert ids == tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert trained(tokenizer, ids, mask) == "5<|endoftext|>6\n<|endoftext|>"
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if not on]) == (
        "<|system|>Count.<|user|>2+3?<|assistant|><|user|>And 1?<|assistant|>"
    )


def sample(tokenizer: Any, answer: str, **fields: Any) -> dict[str, Any]:
    """A line as an evaluation writes it."""
    prompt = tokenizer.apply_chat_template(CHAT[1:2], tokenize=False, add_generation_prompt=True)
    return {"step": 0, "problem": 3, "prompt": prompt, "completion": answer, "reward": 0.0, "versions": [0], **fields}


def test_samples_of_an_evaluation_are_trained_on_as_they_were_sampled(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [sample(tokenizer, "5<|endoftext|>"), sample(tokenizer, "5 and then")])
    config = DatasetConfig(path=path, name="", type="samples", shuffle=False)
    whole, cut = get_sft_dataset(config, tokenizer)
    prompt = tokenizer.apply_chat_template(CHAT[1:2], add_generation_prompt=True, return_dict=False)
    assert whole["input_ids"] == [*prompt, *tokenizer.encode("5"), tokenizer.eos_token_id]
    assert whole["loss_mask"] == [0] * len(prompt) + [1, 1]
    assert trained(tokenizer, cut["input_ids"], cut["loss_mask"]) == "5 and then"
    streamed = get_sft_dataset(dataclasses.replace(config, stream=True), tokenizer)
    assert [next(streamed) for _ in range(2)] == [whole, cut]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turns": [[False, "a"], [True, "b"], [False, "c"]]}, "row 0: turns is .*expected a sample of one prompt and"),
        ({"segments": 2}, "row 0: segments is 2; expected a sample of one prompt and one completion"),
        ({"completion": None}, "row 0: completion is missing or null; expected text"),
    ],
)
def test_samples_that_are_no_prompt_and_completion_are_refused(
    fields: dict[str, Any], message: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path, [sample(tokenizer, "5", **fields)])
    with pytest.raises(UserError, match=message):
        get_sft_dataset(DatasetConfig(path=path, name="", type="samples"), tokenizer)


def test_a_marked_template_and_the_prefix_method_give_the_same_mask(tokenizers: Any) -> None:
    for tokenizer in tokenizers:
        for turns in (CHATML, LLAMA3):
            tokenizer.chat_template = turns.jinja()
            marked = chat_ids(tokenizer, CHAT)
            tokenizer.chat_template = turns.jinja().replace("{% generation %}", "").replace("{% endgeneration %}", "")
            assert chat_ids(tokenizer, CHAT) == marked
            assert trained(tokenizer, *marked) == f"5{turns.end}6\n{turns.end}"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] ~ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(UserError, match="changes an assistant turn once others follow"):
        chat_ids(tokenizer, CHAT)
    ids, mask = chat_ids(tokenizer, CHAT[:3])
    assert trained(tokenizer, ids, mask) == "<think></think>5<|endoftext|>"


def test_sft_reads_chats_and_names_rows_that_do_not_fit(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, {"messages": CHAT[:2]}, {"messages": [{"role": "user"}]}, {"text": "x"}]
    config = DatasetConfig(path=write(tmp_path, rows), type="messages", batch_size=1)
    with pytest.raises(UserError) as caught:
        get_sft_dataset(config, tokenizer)
    assert "row 1: messages is ['system', 'user']; expected at least one assistant turn" in str(caught.value)
    assert "row 2: messages[0].content is missing or null" in str(caught.value)
    assert "row 3: messages is missing or null; expected a list of messages" in str(caught.value)
    batch = next(Batches(get_sft_dataset(config, tokenizer, "skip"), config, pad_sequences_to_tensors))
    assert batch["input_ids"].tolist() == [tokenizer.apply_chat_template(CHAT, return_dict=False)]
    with pytest.raises(UserError, match=r"type 'chatml.intel' .* is not one of method=sft"):
        get_sft_dataset(DatasetConfig(type="chatml.intel"), tokenizer)


def test_chats_and_gsm8k_mix(tokenizer: Any, tmp_path: Path) -> None:
    chats = SourceConfig(write(tmp_path, [{"messages": CHAT}] * 4), type="messages", weight=1.0)
    config = DatasetConfig(sources=[chats, SourceConfig("arithmetic", split="test[:4]", weight=1.0)])
    rows = get_sft_dataset(config, tokenizer)
    assert len(rows) == 8
    assert rows[7] == get_gsm8k_sft_dataset("arithmetic", "test[:4]", tokenizer)[3]


def test_a_chat_template_is_chosen_by_name_file_or_text(tokenizer: Any, tmp_path: Path) -> None:
    original = tokenizer.chat_template
    set_chat_template(tokenizer, "")
    assert tokenizer.chat_template == original
    set_chat_template(tokenizer, "chatml")
    assert tokenizer.apply_chat_template(CHAT[1:2], tokenize=False) == "<|im_start|>user\n2+3?<|im_end|>\n"
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}")
    for choice in (str(tmp_path / "t.jinja"), "{{ messages[0]['content'] }}"):
        set_chat_template(tokenizer, choice)
        assert tokenizer.apply_chat_template(CHAT[1:], tokenize=False) == "2+3?"
    with pytest.raises(
        UserError, match=r"data.chat_template=qwen is not chatml, llama3, a readable file or Jinja text"
    ):
        set_chat_template(tokenizer, "qwen")


TRANSFORMS = """
def gsm(cfg, *args, **kwargs):
    assert cfg["datasets"][0]["type"] == "transforms_{n}.gsm"
    def transform_fn(example, tokenizer=None):
        label = example["answer"].split("####")[-1].strip()
        return {{"prompt": [{{"role": "user", "content": example["question"]}}], "answer": label}}
    return transform_fn, {{"remove_columns": ["question"]}}

def bare(cfg):
    return lambda example, processing_class: {{"prompt": example["question"] + processing_class.eos_token}}

def broken(cfg):
    return lambda example: {{"prompt": example.get("nothing")}}

def no_function(cfg):
    return {{"remove_columns": []}}
"""


@pytest.fixture
def transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a module of transforms into the working folder, under a unique name."""
    name = f"transforms_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TRANSFORMS.format(n=name.removeprefix("transforms_")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_grpo_transform_makes_the_rows(transforms: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": f"{i}+1?", "answer": f"#### {i + 1}", "level": i} for i in range(3)])
    rows = get_rl_dataset(DatasetConfig(path=path, type=f"{transforms}.gsm"), tokenizer)
    assert rows[2] == {"messages": [{"role": "user", "content": "2+1?"}], "answer": "3", "level": 2}
    rows = get_rl_dataset(DatasetConfig(path=path, type=f"{transforms}.bare"), tokenizer)
    assert rows[0]["messages"] == [{"role": "user", "content": "0+1?<|endoftext|>"}]
    assert rows[0]["question"] == "0+1?"
    with pytest.raises(UserError, match="row 0: messages is missing or null; expected a list of messages"):
        get_rl_dataset(DatasetConfig(path=path, type=f"{transforms}.broken"), tokenizer)
    with pytest.raises(UserError, match="it must give transform_fn"):
        get_rl_dataset(DatasetConfig(path=path, type=f"{transforms}.no_function"), tokenizer)
    with pytest.raises(UserError, match="cannot be imported"):
        get_rl_dataset(DatasetConfig(path=path, type=f"{transforms}.ghost"), tokenizer)
    with pytest.raises(UserError, match=r"is not gsm8k, messages or FILE.FUNCTION"):
        get_rl_dataset(DatasetConfig(path=path, type="gsm9k"), tokenizer)


def test_rows_with_messages_become_prompts_unchanged(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": CHAT[:4], "answer": {"any": [1, "two"]}}, {"messages": CHAT}, {"messages": CHAT[:2] * 9}]
    config = DatasetConfig(path=write(tmp_path, rows), type="messages", max_length=60)
    with pytest.raises(UserError, match=r"row 1: messages\[4\]\.role is 'assistant'; a prompt ends before"):
        get_rl_dataset(config, tokenizer)
    assert get_rl_dataset(config, tokenizer, "skip") == [rows[0]]
    assert "1 of 2 prompts over max_length 60 were skipped" in caplog.text
