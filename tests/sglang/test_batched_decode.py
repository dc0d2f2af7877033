"""Batched decode against SGLang's own loop over sequences, on a model of 4.5M parameters."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from megarl.rollout.sglang_server import SGLangServerConfig, SGLangServers
from tests.sglang.tiny_models import save_tokenizer

PROMPTS = [[30 + i, *range(40, 43 + 5 * i)] for i in range(9)]  # of 4 to 44 tokens
NEW_TOKENS = 16


def generate(servers: SGLangServers) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy completions of all prompts at once: ids and their log-probs."""
    body = {
        "input_ids": PROMPTS,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"http://{servers.addresses[0]}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {servers.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return [(a["output_ids"], torch.tensor([v for v, _, _ in a["meta_info"]["output_token_logprobs"]])) for a in found]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("4.5M")
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=704, vocab_size=344, tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=0,
        bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert 4.2e6 < sum(p.numel() for p in model.parameters()) < 4.8e6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(3)  # so that tokens differ, and are far from ties
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def start(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch_module: pytest.MonkeyPatch
) -> Iterator[Callable[..., SGLangServers]]:
    started: list[SGLangServers] = []

    def make(skipped: str = "", **knobs: Any) -> SGLangServers:
        config = SGLangServerConfig(device="cpu", max_total_tokens=8192, **knobs)
        started.append(SGLangServers(config, checkpoint, tmp_path_factory.mktemp("logs")))
        with monkeypatch_module.context() as patch:
            patch.setitem(os.environ, "SGLANG_DISABLED_MODEL_ARCHS", skipped)
            started[-1].start()
        return started[-1]

    yield make
    for servers in started:
        servers.stop()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.timeout(240)
def test_logprobs_are_those_of_the_loop_over_sequences(start: Callable[..., SGLangServers]) -> None:
    loop, batched, split = start("batched_decode"), start(), start(tp_size=2)
    for servers in (loop, batched, split):
        servers.wait_ready()
    expected = generate(loop)
    for servers in (batched, split):
        for (ids, logprobs), (other_ids, others) in zip(generate(servers), expected, strict=True):
            assert ids == other_ids
            torch.testing.assert_close(logprobs, others, atol=5e-6, rtol=0)
    says = "attention over a batch of sequences"
    batching = [says in servers.servers[0].log_path.read_text() for servers in (loop, batched, split)]
    assert batching == [False, True, True]
