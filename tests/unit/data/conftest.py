"""Tokenizers, and caches in temporary folders: the tests never touch the user's caches."""

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
    """The bundled tokenizer, as a copy that tests may change."""
    return copy.deepcopy(bundled_tokenizer)


@pytest.fixture
def chatml_tokenizer(bundled_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerBase:
    """A tokenizer like Qwen's: its eos is `<|im_end|>`, and it adds no bos."""
    tokenizer = copy.deepcopy(bundled_tokenizer)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}, replace_extra_special_tokens=False
    )
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@pytest.fixture
def llama3_tokenizer(bundled_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerBase:
    """A tokenizer like Llama 3's: a text begins with bos."""
    tokenizer = copy.deepcopy(bundled_tokenizer)
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names}, replace_extra_special_tokens=False)
    tokenizer.bos_token, tokenizer.eos_token = names[0], "<|eot_id|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[(names[0], tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.fixture
def tokenizers(
    tokenizer: PreTrainedTokenizerBase,
    chatml_tokenizer: PreTrainedTokenizerBase,
    llama3_tokenizer: PreTrainedTokenizerBase,
) -> list[PreTrainedTokenizerBase]:
    return [tokenizer, chatml_tokenizer, llama3_tokenizer]
