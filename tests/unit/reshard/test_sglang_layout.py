"""Rules of SGLang's layout against chunk and cat, and plans between real layouts of both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_configs import CONFIGS, HEAD_DIM, HIDDEN, VOCAB, config_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from in_memory import check_delivery, checkpoint_of
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig

from megarl.actor.checks import check_layout
from megarl.actor.weights.shards import tensor_shapes, world_table
from megarl.families import FAMILIES
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.reshard.plan.holdings import Topology, dtype_of
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.sglang_layout import Geometry, padded_for_cpu, server_holdings
from megarl.reshard.sync.live_parameters import live_fragments


def test_every_family_of_the_rules_is_tested() -> None:
    assert set(CONFIGS) == set(FAMILIES)


# --- The rules against chunk and cat ---------------------------------------------------------------------------------


def sglang_parameters(tensors: dict[str, Tensor], kv_heads: int, tp_rank: int, tp_size: int) -> dict[str, Tensor]:
    """Parameters of one rank as SGLang's loaders fill them from a dense checkpoint of one layer, by chunk and cat."""
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."

    def kv_shard(part: str, kind: str) -> Tensor:
        projection = tensors[f"{attention}{part}_proj.{kind}"]
        if tp_size <= kv_heads:
            return projection.chunk(tp_size)[tp_rank]
        return projection.chunk(kv_heads)[tp_rank * kv_heads // tp_size]

    def qkv(kind: str) -> Tensor:
        q = tensors[f"{attention}q_proj.{kind}"].chunk(tp_size)[tp_rank]
        return torch.cat([q, kv_shard("k", kind), kv_shard("v", kind)])

    def vocab_shard(name: str) -> Tensor:
        return pad(tensors[name], (0, 0, 0, -VOCAB % 64), value=-1.0).chunk(tp_size)[tp_rank]

    gate_up = [tensors[f"{mlp}{part}_proj.weight"].chunk(tp_size)[tp_rank] for part in ("gate", "up")]
    parameters = {
        "model.embed_tokens.weight": vocab_shard("model.embed_tokens.weight"),
        f"{attention}qkv_proj.weight": qkv("weight"),
        f"{attention}o_proj.weight": tensors[f"{attention}o_proj.weight"].chunk(tp_size, dim=1)[tp_rank],
        f"{mlp}gate_up_proj.weight": torch.cat(gate_up),
        f"{mlp}down_proj.weight": tensors[f"{mlp}down_proj.weight"].chunk(tp_size, dim=1)[tp_rank],
        "lm_head.weight": vocab_shard("lm_head.weight"),
    }
    if f"{attention}q_proj.bias" in tensors:
        parameters[f"{attention}qkv_proj.bias"] = qkv("bias")
    return parameters | {name: tensor for name, tensor in tensors.items() if "norm" in name}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_fragments_show_their_box_and_together_cover_the_checkpoint(tp_size: int, kv_heads: int, family: str) -> None:
    config = config_of(family, num_key_value_heads=kv_heads)
    tensors = checkpoint_of(tensor_shapes(config))
    holders = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(tp_size):
        parameters = sglang_parameters(tensors, kv_heads, rank, tp_size)
        for fragment in live_fragments(parameters.items(), Geometry.of(config, rank, tp_size)):
            assert fragment.rank == rank
            assert torch.equal(fragment.view, fragment.box.of(tensors[fragment.box.name]))
            held = parameters[fragment.tensor]
            assert fragment.view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr(), "a copy, not a view"
            fragment.box.of(holders[fragment.box.name]).add_(1)
    for name, count in holders.items():
        shared_kv = tp_size > kv_heads and ("k_proj" in name or "v_proj" in name)
        copies = tp_size if "norm" in name else tp_size // kv_heads if shared_kv else 1
        assert (count == copies).all(), name


def test_a_vocabulary_that_tp_does_not_divide_is_padded_to_a_larger_multiple() -> None:
    config = config_of("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=24, vocab_size=300)
    spans = [Geometry.of(config, rank, 3).vocab_span for rank in range(3)]
    assert [(s.start, s.size, s.stop) for s in spans] == [(0, 128, 128), (128, 128, 256), (256, 128, 300)]


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_by_ep_rank_and_cut_by_the_rest_of_tp(family: str, tp_size: int, ep_size: int) -> None:
    config = config_of(family)
    block, gate, up, down = (
        ("mlp", "gate_proj", "up_proj", "down_proj")
        if family == "qwen3_moe"
        else ("block_sparse_moe", "w1", "w3", "w2")
    )
    experts = f"model.layers.0.{block}.experts"
    tensors = checkpoint_of(tensor_shapes(config))
    moe_tp, local = tp_size // ep_size, 4 // ep_size
    for rank in range(tp_size):
        rank_experts = range(rank // moe_tp * local, (rank // moe_tp + 1) * local)
        part = rank % moe_tp
        w13 = [
            torch.cat([tensors[f"{experts}.{e}.{n}.weight"].chunk(moe_tp)[part] for n in (gate, up)])
            for e in rank_experts
        ]
        w2 = [tensors[f"{experts}.{e}.{down}.weight"].chunk(moe_tp, dim=1)[part] for e in rank_experts]
        geometry = Geometry.of(config, rank, tp_size, ep_size)
        live = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in geometry.parameters()}
        for fragment in live_fragments(live.items(), geometry):
            fragment.view.copy_(fragment.box.of(tensors[fragment.box.name]))
        assert torch.equal(live[f"{experts}.w13_weight"], torch.stack(w13))
        assert torch.equal(live[f"{experts}.w2_weight"], torch.stack(w2))
        router = f"model.layers.0.{block}.gate.weight"
        assert torch.equal(live[router], tensors[router])


def test_padding_heads_and_neurons_belong_to_no_checkpoint_row() -> None:
    # One KV head with a group of 4 and 40 neurons at tp 2 on CPU: SGLang serves 2 KV heads, 8 heads and 64 neurons.
    plain = config_of("llama", num_attention_heads=4, num_key_value_heads=1, intermediate_size=40)
    config = padded_for_cpu(plain, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (8, 2, 64)
    held = []
    for rank in range(2):
        geometry = Geometry.of(config, rank, 2)
        shapes = {p.name.removeprefix("model.layers.0."): p.shape for p in geometry.parameters()}
        assert shapes["self_attn.qkv_proj.weight"] == ((4 + 2) * HEAD_DIM, HIDDEN)
        assert shapes["self_attn.o_proj.weight"] == (HIDDEN, 4 * HEAD_DIM)
        assert shapes["mlp.gate_up_proj.weight"] == (2 * 32, HIDDEN)
        boxes = [part.box for p in geometry.parameters() for part in p.parts if "_proj" in p.name]
        held.append({box.name.split(".")[-2]: (box.start, box.stop) for box in boxes})
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(held[0]) == attention | {"gate_proj", "up_proj", "down_proj"}
    assert held[0]["q_proj"] == ((0, 0), (4 * HEAD_DIM, HIDDEN))
    assert held[0]["k_proj"] == ((0, 0), (HEAD_DIM, HIDDEN))
    assert set(held[1]) == {"gate_proj", "up_proj", "down_proj"}
    assert held[1]["up_proj"] == ((32, 0), (40, HIDDEN))
    assert held[1]["down_proj"] == ((0, 32), (HIDDEN, 40))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_tied_head_is_one_parameter_or_a_second_copy_as_the_family_has_it(family: str) -> None:
    names = {p.name: p for p in Geometry.of(config_of(family, tie_word_embeddings=True), 0, 1).parameters()}
    if family == "llama":
        assert "lm_head.weight" not in names
    else:
        assert names["lm_head.weight"].parts == names["model.embed_tokens.weight"].parts


def test_dense_layers_between_experts_are_planned() -> None:
    config = config_of("qwen3_moe", mlp_only_layers=[1], num_hidden_layers=3)
    geometry = Geometry.of(config, 1, 2, 2)
    names = [p.name for p in geometry.parameters() if ".mlp." in p.name and "gate.weight" not in p.name]
    sparse = ["mlp.experts.w13_weight", "mlp.experts.w2_weight"]
    dense = ["mlp.gate_up_proj.weight", "mlp.down_proj.weight"]
    expected = [f"model.layers.{i}.{name}" for i, part in enumerate((sparse, dense, sparse)) for name in part]
    assert names == expected
    trainer = source_holdings(
        world_table(config, ParallelConfig(tp_size=2, ep_size=2, etp_size=1, sequence_parallel=True))
    )
    servers = server_holdings(config, tp_size=2, ep_size=2)
    planned = plan(trainer, servers, Topology.of_sizes(2, [2], ranks_per_node=8), bucket_bytes=1 << 20)
    assert planned.waived == ()
    assert (planned.bytes_in == planned.bytes_needed).all()


@pytest.mark.parametrize(
    ("family", "changes", "sizes", "message"),
    [
        ("llama", {}, (3, 1), "cannot share out 2 KV heads"),
        (
            "llama",
            {"num_attention_heads": 6, "hidden_size": 24},
            (4, 1),
            "share 6 attention heads out to 4 ranks at tp_size=4",
        ),
        ("llama", {"intermediate_size": 49}, (2, 1), "share 49 MLP neurons out to 2 ranks"),
        ("mixtral", {}, (4, 3), "ep_size=3 must divide its tp_size=4"),
        ("mixtral", {"intermediate_size": 49}, (2, 1), "share 49 neurons of an expert out to 2 ranks"),
        ("mixtral", {"num_local_experts": 3}, (2, 2), "share 3 experts out to 2 ranks"),
        (
            "gpt2",
            {},
            (1, 1),
            "'gpt2' models have no rule for live weight updates; known are gemma3_text, gpt_oss, llama, mistral",
        ),
    ],
)
def test_what_the_rules_cannot_share_out_is_refused(
    family: str, changes: dict[str, Any], sizes: tuple[int, int], message: str
) -> None:
    config: Any = config_of(family, **changes) if family in CONFIGS else SimpleNamespace(model_type=family)
    with pytest.raises(UserError, match=message):
        Geometry.of(config, 0, *sizes)


# --- Plans between layouts of the actor and of SGLang ----------------------------------------------------------------


@dataclass
class Worlds:
    """A model with a layout of the actor and a layout of servers."""

    config: PretrainedConfig
    parallel: ParallelConfig
    servers: dict[str, Any]
    bucket_bytes: int


@st.composite
def worlds(draw: st.DrawFn) -> Worlds:
    """Mostly worlds that pass the checks of both sides; the test skips the others."""
    one_to_four, one_or_two = st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])
    family = draw(st.sampled_from(sorted(FAMILIES)))
    moe = FAMILIES[family].experts
    tp, pp, cp = draw(one_to_four), draw(one_or_two), draw(one_or_two)
    vpp = draw(one_or_two) if pp > 1 else 1
    ep = draw(one_to_four) if moe else 1
    etp = draw(st.sampled_from([None, 1])) if moe else None
    experts = ep * (etp or tp)
    dp = draw(one_or_two) * max(1, experts // (tp * cp))
    uneven = draw(st.integers(0, 2)) if pp > 1 and vpp == 1 else 0
    layers = uneven + (pp - 1) if uneven else pp * vpp * draw(one_or_two)
    kv_heads = draw(one_to_four)
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.sampled_from([4 // kv_heads, 4, 8])),
        "intermediate_size": draw(st.sampled_from([8, 24, 40])),
        "vocab_size": draw(st.integers(5, 150)),
        "hidden_size": 32,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = draw(st.sampled_from([4, 8]))
    if family == "llama":
        sizes["attention_bias"] = draw(st.booleans())
    server_tp = draw(one_to_four)
    return Worlds(
        config=config_of(family, **sizes),
        parallel=ParallelConfig(
            tp_size=tp,
            pp_size=pp,
            vpp_size=vpp,
            cp_size=cp,
            dp_size=dp,
            ep_size=ep,
            etp_size=etp,
            first_stage_layers=uneven,
        ),
        servers={
            "tp_size": server_tp,
            "ep_size": draw(st.sampled_from([1, server_tp])) if moe else 1,
            "n_servers": draw(st.integers(1, 3)),
            "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
            "cpu": draw(st.booleans()),
        },
        bucket_bytes=draw(st.sampled_from([1000, 7000, 60_000])),
    )


@given(worlds())
@settings(max_examples=50)
def test_a_plan_between_real_layouts_delivers_everything_once_and_bit_equal(worlds: Worlds) -> None:
    check_plan(worlds)


@pytest.mark.long
@given(worlds())
@settings(max_examples=500)
def test_a_plan_between_many_real_layouts_delivers_everything_once_and_bit_equal(worlds: Worlds) -> None:
    check_plan(worlds)


def check_plan(worlds: Worlds) -> None:
    config, parallel = worlds.config, worlds.parallel
    try:
        parallel.check()
        check_layout(config, parallel)
        ranks = parallel.world_size()
        sources = source_holdings(world_table(config, parallel), "float64")
        destinations = server_holdings(config, **worlds.servers)
    except UserError:
        assume(False)
    tp_size, n_servers = worlds.servers["tp_size"], worlds.servers["n_servers"]
    topology = Topology.of_sizes(ranks, [tp_size] * n_servers, 4)
    transfer_plan = plan(sources, destinations, topology, worlds.bucket_bytes)
    assert transfer_plan.waived == ()
    check_delivery(transfer_plan, checkpoint_of(tensor_shapes(config)))
    model = (
        sum(math.prod(shape) for shape in tensor_shapes(config).values()) * dtype_of(worlds.servers["dtype"]).itemsize
    )
    assert (transfer_plan.bytes_in.reshape(n_servers, tp_size).sum(axis=1) >= model).all()
    if tp_size == 1 and not config.tie_word_embeddings:
        assert (transfer_plan.bytes_in == model).all()


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("cpu", [False, True])
def test_holdings_of_servers_are_the_fragments_of_their_ranks(family: str, cpu: bool) -> None:
    config = config_of(family, num_hidden_layers=2)
    ep_size = 2 if FAMILIES[family].experts and family != "gpt_oss" else 1
    held = server_holdings(config, tp_size=2, ep_size=ep_size, n_servers=3, cpu=cpu)
    assert held.holders == ((0, 2, 4), (1, 3, 5))
    dims = held.start.shape[1]
    for rank in range(2):
        geometry = Geometry.of(padded_for_cpu(config, 2) if cpu else config, rank, 2, ep_size)
        boxes = [part.box for parameter in geometry.parameters() for part in parameter.parts]
        by_rule = {(b.name, *(*b.start, 0, 0)[:dims], *(*b.stop, 1, 1)[:dims]) for b in boxes}
        rows = held.rows_of(rank)
        names = [held.names[t] for t in held.tensor[rows]]
        table = {
            (n, *a, *b) for n, a, b in zip(names, held.start[rows].tolist(), held.stop[rows].tolist(), strict=True)
        }
        assert table == by_rule
