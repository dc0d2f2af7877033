"""Generation steps by our kernels against SGLang's own modules and its loop over sequences: 4.5M parameters."""

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

from megarl.cpu.sglang_platform import LONGEST_PROMPT
from megarl.rollout.servers.server_config import SGLangServerConfig
from megarl.rollout.servers.sglang_server import SGLangServers
from tests.sglang.tiny_models import save_tokenizer

PROMPTS = [[30 + i, *range(40, 43 + 5 * i)] for i in range(9)]  # of 4 to 44 tokens
PROMPTS += [[40 + i % 250 for i in range(LONGEST_PROMPT + 20)]]  # which SGLang's own modules prefill
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
    with urllib.request.urlopen(request, timeout=900) as answer:
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
        for name in ("speculative_algorithm", "speculative_num_draft_tokens") if skipped else ():
            del started[-1].servers[0].args[name]
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


@pytest.mark.long
def test_logprobs_are_those_of_the_loop_over_sequences(start: Callable[..., SGLangServers]) -> None:
    own = start("batched_decode,dense,fused_step")
    ours = {"attention": start("dense,fused_step"), "whole steps": start(), "two ranks": start(tp_size=2)}
    for servers in (own, *ours.values()):
        servers.wait_ready()
    expected = generate(own)
    for name, servers in ours.items():
        generate(servers)  # so that what is compared finds the first tokens of its prompts in the cache
        for (ids, logprobs), (other_ids, others) in zip(generate(servers), expected, strict=True):
            assert ids == other_ids, name
            torch.testing.assert_close(logprobs, others, atol=5e-6, rtol=0)
    for says, where in (
        ("attention over a batch of sequences", {"attention", "whole steps", "two ranks"}),
        ("generation steps in a few calls", {"whole steps"}),
    ):
        logs = {name: servers.servers[0].log_path.read_text() for name, servers in {"own": own, **ours}.items()}
        assert {name for name, text in logs.items() if says in text} == where
