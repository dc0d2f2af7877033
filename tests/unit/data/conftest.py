"""Caches of the tests' own: nothing is read from or left in the user's."""

from pathlib import Path

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import train_tokenizer


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer()
