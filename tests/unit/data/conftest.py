"""Caches of the tests' own: nothing is read from or left in the user's."""

import copy
from pathlib import Path

import datasets
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.data.tokenizer import train_tokenizer


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def bundled_tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture
def tokenizer(bundled_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerBase:
    """The bundled tokenizer; tests may change it."""
    return copy.deepcopy(bundled_tokenizer)


@pytest.fixture
def chatml_tokenizer(bundled_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerBase:
    """One as Qwen's: `<|im_end|>` is its eos, and it puts no bos."""
    made = copy.deepcopy(bundled_tokenizer)
    made.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}, replace_extra_special_tokens=False
    )
    made.eos_token = "<|im_end|>"
    return made


@pytest.fixture
def llama3_tokenizer(bundled_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerBase:
    """One as Llama 3's: a text begins with bos."""
    made = copy.deepcopy(bundled_tokenizer)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made.add_special_tokens({"additional_special_tokens": names}, replace_extra_special_tokens=False)
    made.bos_token, made.eos_token = names[0], "<|eot_id|>"
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[(names[0], made.bos_token_id)]
    )
    return made


@pytest.fixture
def tokenizers(
    tokenizer: PreTrainedTokenizerBase,
    chatml_tokenizer: PreTrainedTokenizerBase,
    llama3_tokenizer: PreTrainedTokenizerBase,
) -> list[PreTrainedTokenizerBase]:
    return [tokenizer, chatml_tokenizer, llama3_tokenizer]
