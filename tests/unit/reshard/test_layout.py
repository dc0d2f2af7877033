"""Boxes of the checkpoint, and which of them each rank of an SGLang server holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.reshard.layout import Box, Fragment
from megarl.reshard.sglang import Geometry, fragments

HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 8, 4, 24, 48, 347


def checkpoint(kv_heads: int, bias: bool) -> dict[str, Tensor]:
    """One layer in the checkpoint's names and shapes; every element has another value."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (kv_heads * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (kv_heads * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.self_attn.q_norm.weight": (HEAD_DIM,),
        "model.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    if bias:
        for part, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"model.layers.0.self_attn.{part}_proj.bias"] = (heads * HEAD_DIM,)
    start, tensors = 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        start += size
    return tensors


def sglang_parameters(tensors: dict[str, Tensor], kv_heads: int, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
    """What SGLang's loaders make of the checkpoint on one rank, written with chunk and cat."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."

    def q_shard(kind: str) -> Tensor:
        return tensors[f"{attention}q_proj.{kind}"].chunk(tp_size)[tp_rank]

    def kv_shard(part: str, kind: str) -> Tensor:
        whole = tensors[f"{attention}{part}_proj.{kind}"]
        if tp_size <= kv_heads:
            return whole.chunk(tp_size)[tp_rank]
        return whole.chunk(kv_heads)[tp_rank * kv_heads // tp_size]

    def vocab_shard(name: str) -> Tensor:
        padded = pad(tensors[name], (0, 0, 0, -VOCAB % (64 * tp_size)), value=-1.0)
        return padded.chunk(tp_size)[tp_rank]

    parameters = {
        "model.embed_tokens.weight": vocab_shard("model.embed_tokens.weight"),
        f"{attention}qkv_proj.weight": torch.cat([q_shard("weight"), kv_shard("k", "weight"), kv_shard("v", "weight")]),
        f"{attention}o_proj.weight": tensors[f"{attention}o_proj.weight"].chunk(tp_size, dim=1)[tp_rank],
        f"{attention}q_norm.weight": tensors[f"{attention}q_norm.weight"],
        f"{mlp}gate_up_proj.weight": torch.cat(
            [tensors[f"{mlp}{part}_proj.weight"].chunk(tp_size)[tp_rank] for part in ("gate", "up")]
        ),
        f"{mlp}down_proj.weight": tensors[f"{mlp}down_proj.weight"].chunk(tp_size, dim=1)[tp_rank],
        "model.layers.0.input_layernorm.weight": tensors["model.layers.0.input_layernorm.weight"],
        "model.norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": vocab_shard("lm_head.weight"),
    }
    if f"{attention}q_proj.bias" in tensors:
        parameters[f"{attention}qkv_proj.bias"] = torch.cat(
            [q_shard("bias"), kv_shard("k", "bias"), kv_shard("v", "bias")]
        )
    return parameters


def config(kv_heads: int, **changes: int) -> SimpleNamespace:
    sizes = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCAB,
    }
    return SimpleNamespace(**(sizes | changes))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "qkv-bias"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_fragments_show_their_box_and_together_cover_the_checkpoint(tp_size: int, kv_heads: int, bias: bool) -> None:
    tensors = checkpoint(kv_heads, bias)
    holders = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(tp_size):
        parameters = sglang_parameters(tensors, kv_heads, rank, tp_size)
        geometry = Geometry.of(config(kv_heads), rank, tp_size)
        for fragment in fragments(parameters.items(), geometry):
            assert fragment.rank == rank
            assert torch.equal(fragment.view, fragment.box.of(tensors[fragment.box.name]))
            held = parameters[fragment.tensor]
            assert fragment.view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr(), "a copy, not a view"
            fragment.box.of(holders[fragment.box.name]).add_(1)
    for name, count in holders.items():
        replicated = "norm" in name or (tp_size > kv_heads and ("k_proj" in name or "v_proj" in name))
        copies = (tp_size if "norm" in name else tp_size // kv_heads) if replicated else 1
        assert (count == copies).all(), name


def test_padding_heads_and_neurons_belong_to_no_checkpoint_row() -> None:
    # One KV head with a group of 4 and 40 neurons at tp 2 on CPU: SGLang serves 2 KV heads, 8 heads and 64 neurons.
    padded = config(
        2,
        num_attention_heads=8,
        intermediate_size=64,
        original_num_attention_heads=4,
        original_total_num_kv_heads=1,
        original_intermediate_size=40,
    )
    shapes = {
        "model.layers.0.self_attn.qkv_proj.weight": (4 * HEAD_DIM + 2 * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 4 * HEAD_DIM),
        "model.layers.0.mlp.gate_up_proj.weight": (2 * 32, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 32),
    }
    held = []
    for rank in range(2):
        parameters = ((name, torch.zeros(shape)) for name, shape in shapes.items())
        held.append(
            {
                fragment.box.name.split(".")[-2]: (fragment.box.start, fragment.box.stop)
                for fragment in fragments(parameters, Geometry.of(padded, rank, 2))
            }
        )
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(held[0]) == attention | {"gate_proj", "up_proj", "down_proj"}
    assert held[0]["q_proj"] == ((0, 0), (4 * HEAD_DIM, HIDDEN))
    assert held[0]["k_proj"] == ((0, 0), (HEAD_DIM, HIDDEN))
    assert set(held[1]) == {"gate_proj", "up_proj", "down_proj"}
    assert held[1]["up_proj"] == ((32, 0), (40, HIDDEN))
    assert held[1]["down_proj"] == ((0, 32), (HIDDEN, 40))


def test_a_parameter_of_an_unexpected_shape_is_refused_with_both_shapes() -> None:
    wrong = {"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(2 * INTERMEDIATE + 2, HIDDEN)}
    with pytest.raises(ValueError, match=r"has shape \[98, 24\], and the layout known to megarl \[96, 24\]"):
        list(fragments(wrong.items(), Geometry.of(config(2), 0, 1)))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.w13_weight", "visual.proj.weight", "lm_head.bias"])
def test_a_parameter_without_a_rule_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no rule says"):
        list(fragments([(name, torch.zeros(4, 4))], Geometry.of(config(2), 0, 1)))


@pytest.mark.parametrize(("start", "stop"), [((0,), (0,)), ((3,), (2,)), ((-1,), (2,)), ((0, 0), (2,))])
def test_an_empty_or_crooked_box_is_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is not a box"):
        Box("w", start, stop)


@pytest.mark.parametrize("shape", [(3, 4), (8,), (8, 3)])
def test_a_box_that_leaves_its_tensor_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the box ends at"):
        Box("w", (2, 0), (5, 4)).of(torch.zeros(shape))


def test_a_fragment_whose_view_has_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shows \(2, 4\)"):
        Fragment(0, "w", Box("w", (2, 0), (5, 4)), torch.zeros(2, 4))
