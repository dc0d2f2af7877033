"""Sliding windows and sinks over packed sequences equal transformers' gpt-oss attention, one sequence at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megarl.actor.batch.context_parallel import Cut, LocalTokens, local_tokens
from megarl.actor.batch.shared_prefix import share
from megarl.actor.config import EngineConfig
from megarl.actor.engine import MegatronEngine
from megarl.actor.model.attention import windows_and_sinks
from megarl.actor.model.attention.packed import PackedAttention, pack_in_blocks
from megarl.parallel import groups
from megarl.types import PackedBatch, cu_seqlens_of

CPU, HEADS, KV_HEADS, DIM = torch.device("cpu"), 6, 2, 5
LENGTHS = [1, 33, 2, 29, 61, 17, 8]
CONFIG = SimpleNamespace(
    kv_channels=DIM,
    context_parallel_size=1,
    num_attention_heads=HEADS,
    tensor_model_parallel_size=1,
    params_dtype=torch.float32,
    use_cpu_initialization=True,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts windows into several chunks at these lengths."""
    monkeypatch.setattr(windows_and_sinks, "CHUNK", 7)


def by_transformers(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int, sinks: Tensor
) -> Tensor:
    module: Any = SimpleNamespace(sinks=sinks, num_key_value_groups=HEADS // KV_HEADS, training=False)
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0) | ((distance >= window) if window else False)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = eager_attention_forward(module, q, k, v, mask[None, None], scaling=0.3)
        outputs.append(out[0].flatten(1))
    return torch.cat(outputs)


def inputs_of(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, n, DIM, generator=generator).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)]


def attention_of(window: int, sinks: bool) -> PackedAttention:
    module = PackedAttention(CONFIG, softmax_scale=0.3, window=window, sinks=sinks)
    if module.softmax_offset is not None:
        module.softmax_offset.data = torch.randn(HEADS, generator=torch.Generator().manual_seed(1)) * 2
    return module


def sinks_of(module: PackedAttention) -> Tensor:
    """The module's sinks; without any, sinks of no weight."""
    return torch.full((HEADS,), float("-inf")) if module.softmax_offset is None else module.softmax_offset


def packings() -> dict[str, tuple[list[int], list[tuple[Any, LocalTokens | None, Tensor]]]]:
    """By name: the sequences' lengths, and for each rank its blocks, its tokens, and the rows of all keys."""
    bounds = cu_seqlens_of(torch.tensor(LENGTHS))
    total = int(bounds[-1])
    result = {"packed": (LENGTHS, [(pack_in_blocks(bounds, CPU), None, torch.arange(total))])}
    for size in (2, 4):
        cuts = [Cut(rank, size) for rank in range(size)]
        padded = cuts[0].padded_cu_seqlens(bounds)
        ranks = [(pack_in_blocks(padded, CPU, cut), local_tokens(bounds, padded, cut)) for cut in cuts]
        rows = torch.cat([tokens.source for _, tokens in ranks])
        result[f"cp{size}"] = (LENGTHS, [(blocks, tokens, rows) for blocks, tokens in ranks])
    return result


@pytest.mark.parametrize(("window", "sinks"), [*itertools.product((0, 1, 4, 16, 61), (False, True))])
def test_windows_and_sinks_of_packed_and_cut_sequences(window: int, sinks: bool) -> None:
    for name, (lengths, ranks) in packings().items():
        module = attention_of(window, sinks)
        inputs = inputs_of(sum(lengths))
        expected = by_transformers(*inputs, lengths, window, sinks_of(module))
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
        parameters = [*inputs, *module.parameters()]
        wanted = torch.autograd.grad((expected * weights).sum(), parameters)
        got = torch.zeros_like(expected)
        for blocks, tokens, rows in ranks:
            keys, values = (x[rows.clamp(min=0)] for x in inputs[1:])
            mine = torch.arange(len(expected)) if tokens is None else tokens.source
            out = module(inputs[0][mine.clamp(min=0)], keys, values, None, packed_seq_params=blocks)
            got = got.index_add(0, mine[mine >= 0], out[mine >= 0])
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0, msg=name)
        for gradient, reference in zip(torch.autograd.grad((got * weights).sum(), parameters), wanted, strict=True):
            torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("window", [0, 3, 12])
def test_windows_and_sinks_where_prompts_are_read_once(window: int) -> None:
    """Queries of a shared prompt are skipped in all sequences but one, under a mask."""
    prompt, generator = list(range(25)), torch.Generator().manual_seed(0)
    sequences = [prompt + torch.randint(30, 40, (n,), generator=generator).tolist() for n in (3, 9, 0, 6)] + [[7] * 11]
    lengths = [len(s) for s in sequences]
    tokens = torch.tensor([t for s in sequences for t in s])
    batch = PackedBatch(
        cu_seqlens_of(torch.tensor(lengths)), {"input_ids": tokens}, {"group_ids": torch.tensor([0, 0, 0, 0, 1])}
    )
    shared = share(batch)
    blocks = pack_in_blocks(batch.cu_seqlens, CPU, shared=shared)
    assert any(block.mask is not None for block in blocks.blocks)
    module = attention_of(window, sinks=True)
    inputs = inputs_of(len(shared.source))
    expected = by_transformers(*(x[shared.rows] for x in inputs), lengths, window, sinks_of(module))
    out = module(*inputs, None, packed_seq_params=blocks)
    torch.testing.assert_close(out[shared.rows], expected, atol=2e-6, rtol=0)


def test_sinks_in_bfloat16_keep_the_digits_that_one_number_of_16_bits_would_lose() -> None:
    module = attention_of(0, sinks=True)
    query, key, value = (x.detach().bfloat16() for x in inputs_of(sum(LENGTHS)))
    expected = by_transformers(*(x.float() for x in (query, key, value)), LENGTHS, 0, sinks_of(module))
    blocks = pack_in_blocks(cu_seqlens_of(torch.tensor(LENGTHS)), CPU)
    out = module(query, key, value, None, packed_seq_params=blocks).float()
    assert (out - expected).abs().max() < 2**-7


def test_sinks_bear_megatrons_mark_of_a_tensor_cut_over_ranks() -> None:
    sinks = attention_of(0, sinks=True).softmax_offset
    assert getattr(sinks, "tensor_model_parallel", False)
    assert getattr(sinks, "partition_dim", -1) == 0
    config = SimpleNamespace(**{**vars(CONFIG), "tensor_model_parallel_size": 3})
    assert windows_and_sinks.new_sinks(config).shape == (2,)


def test_two_tables_of_rotary_frequencies_without_a_window_in_use(checkpoints: Callable[..., Path]) -> None:
    """Windows as long as the context are none, and layers still differ in their positions."""
    folder = checkpoints("gemma3_text", tied=True, sliding_window=512, num_hidden_layers=6)
    ids = torch.randint(0, 343, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    engine = MegatronEngine(EngineConfig(path=str(folder)))
    engine.initialize()
    try:
        logprobs = engine.eval().logprobs({"input_ids": ids}).view(2, 21)
    finally:
        groups.destroy()
    torch.testing.assert_close(logprobs[:, 1:], expected, rtol=0, atol=1e-5)
