"""Quantised weights in a plan: each rank quantises its own part, and the parts are those of the whole, to the bit."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from family_configs import config_of
from in_memory import packed, part_of
from torch import Tensor, nn

from megarl.actor.sizes.server_memory import server_memory
from megarl.actor.weights.computed_boxes import ComputedBox, View
from megarl.actor.weights.shards import shard_specs, tensor_shapes, world_table
from megarl.families.weight_formats import FORMATS, SCALE, ServedFormat
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import places
from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Topology, dtype_of
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.quantised import merged, quantised_sources
from megarl.reshard.plan.sglang_layout import Geometry, server_holdings
from megarl.reshard.quantised_weights import QuantisedWeights, quantised
from megarl.reshard.sync.live_parameters import LayoutError, check_plain, live_fragments, view_of
from megarl.reshard.sync.trainer_rank import fragments_of
from megarl.reshard.sync.world import describe_fragments, described_boxes
from tests import rows

pytestmark = rows.marks()

WIDE = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512,
    "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip
BLOCKS, CHANNELS, GROUPS = (FORMATS[name] for name in ("fp8", "fp8_channel", "int4"))
LAYOUTS = (ParallelConfig(), ParallelConfig(tp_size=2), ParallelConfig(tp_size=2, pp_size=2, dp_size=2))
LATENT = {  # the last block of kv_a_proj_with_mqa has 32 rows
    "moe_intermediate_size": 256, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 8, "head_dim": None,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 256},
    "mixtral": {},
    "glm4_moe": {"moe_intermediate_size": 256},
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
}
SPREAD = (
    ParallelConfig(tp_size=2),
    ParallelConfig(dp_size=2, ep_size=2),
    ParallelConfig(tp_size=2, pp_size=2, dp_size=2, ep_size=4, etp_size=1),
)
CASES = [("qwen3", parallel, tp, 1, format) for parallel in LAYOUTS for tp in (1, 2) for format in FORMATS.values()]
CASES += [
    (family, parallel, tp, ep, format)
    for format in (BLOCKS, GROUPS)
    for family in EXPERTS
    if family in format.families
    for parallel, (tp, ep) in zip(SPREAD, ((1, 1), (2, 1), (2, 2)), strict=True)
    if format is BLOCKS or (family, ep) == ("qwen3_moe", 2)
]


def model_of(family: str = "qwen3", **sizes: Any) -> Any:
    fields = WIDE | EXPERTS.get(family, {}) | sizes
    return config_of(family, **{name: value for name, value in fields.items() if value is not None})


@dataclass(frozen=True)
class Shard:
    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    view: View


@dataclass(frozen=True)
class RankWeights:
    """One trainer rank's parts of a checkpoint. Projections to values are made when they are read, as with adapters."""

    config: Any
    parallel: ParallelConfig
    place: Any
    checkpoint: dict[str, Tensor]

    def shards(self) -> list[Shard]:
        specs = shard_specs(self.config, self.parallel, self.place)
        boxes = [
            Box(s.name, tuple(s.start), tuple(s.stop))
            for s in specs
            if all(a < b for a, b in zip(s.start, s.stop, strict=True))
        ]
        return [Shard(box.name, box.start, box.stop, self._view(box)) for box in boxes]

    def _view(self, box: Box) -> View:
        view = box.of(self.checkpoint[box.name])
        if not box.name.endswith("v_proj.weight"):
            return view
        return ComputedBox(box.shape, view.dtype, view.data_ptr(), lambda: view)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.checkpoint.items())


@dataclass
class Threads:
    """A tensor-parallel group whose ranks are threads."""

    ranks: int
    given: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=300)

    def size(self) -> int:
        return self.ranks

    def reduce(self, tensor: Tensor, op: Any) -> None:
        self.given.append(tensor.clone())
        self.barrier.wait()
        ranks = torch.stack(self.given)
        tensor.copy_({dist.ReduceOp.MAX: ranks.amax(dim=0), dist.ReduceOp.SUM: ranks.sum(dim=0)}[op])


def quantised_ranks(
    config: Any, parallel: ParallelConfig, checkpoint: dict[str, Tensor], format: ServedFormat
) -> list[list[Fragment]]:
    """Fragments of all trainer ranks, quantised at once."""
    ranks = list(places(parallel))
    groups: dict[Any, Threads] = {}
    sources = []
    for place in ranks:
        group = groups.setdefault((place.pp, place.cp, place.dp), Threads(parallel.tp_size))
        sources.append(QuantisedWeights(RankWeights(config, parallel, place, checkpoint), format, group))  # type: ignore[arg-type]
    with ThreadPoolExecutor(len(sources)) as pool:
        shards = list(pool.map(lambda source: source.shards(), sources))
    return [fragments_of(rank, of_rank) for rank, of_rank in enumerate(shards)]


@pytest.fixture(autouse=True)
def threads_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: group.reduce(tensor, op))


def weights(config: Any, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(config).items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def rows_of(side: Holdings) -> set[tuple[Any, ...]]:
    """Boxes with their dtypes and ranks, in no order; replicated ones have several rows in one of the tables."""
    return {
        (
            side.names[side.tensor[i]],
            *(tuple(corner[i].tolist()) for corner in (side.start, side.stop)),
            side.dtypes[side.dtype[i]],
            rank,
        )
        for i in range(len(side.tensor))
        for rank in side.holders[side.holder[i]]
    }


@pytest.mark.parametrize(("family", "parallel", "tp_size", "ep_size", "format"), rows.every(2, CASES))
def test_servers_get_what_quantises_the_whole_checkpoint_from_every_layout(
    family: str, parallel: ParallelConfig, tp_size: int, ep_size: int, format: ServedFormat
) -> None:
    config = model_of(family)
    checkpoint = weights(config)
    whole = dict(quantised(checkpoint.items(), format))
    held = quantised_ranks(config, parallel, checkpoint, format)
    described = Holdings.of([described_boxes(describe_fragments(fragments)) for fragments in held])
    servers = server_holdings(config, tp_size=tp_size, ep_size=ep_size, dtype="float32", format=format)
    made = plan(described, servers, Topology.of_sizes(len(held), [tp_size], 8), 4096)
    predicted = quantised_sources(source_holdings(world_table(config, parallel), "float32"), format, parallel)
    assert rows_of(predicted) == rows_of(described), "preflight plans with the parts that ranks publish"
    outgoing = {m.index: (rank, m) for rank in range(len(held)) for m in made.sends(rank)}
    for rank in range(tp_size):
        rows = servers.rows_of(rank)
        boxes = [
            Box(servers.names[servers.tensor[i]], tuple(servers.start[i].tolist()), tuple(servers.stop[i].tolist()))
            for i in rows
        ]
        boxes = [Box(b.name, b.start[: whole[b.name].dim()], b.stop[: whole[b.name].dim()]) for b in boxes]
        dtypes = [dtype_of(servers.dtypes[servers.dtype[i]]) for i in rows]
        targets = [torch.zeros(box.shape, dtype=dtype) for box, dtype in zip(boxes, dtypes, strict=True)]
        for message in made.receives(rank):
            source, sent = outgoing[message.index]
            wire = packed([fragment.view for fragment in held[source]], sent)
            for i in range(len(message)):
                target = part_of(targets[message.fragment[i]], message.start[i], message.stop[i])
                at = message.offset[i]
                target.copy_(wire[at : at + target.nbytes].view(target.dtype).view(target.shape))
        for box, target in zip(boxes, targets, strict=True):
            assert torch.equal(bits(target), bits(box.of(whole[box.name]).to(target.dtype))), box
    assert (
        made.bytes_needed.sum()
        < 0.45
        * plan(
            source_holdings(world_table(config, parallel), "float32"),
            server_holdings(config, tp_size=tp_size, ep_size=ep_size, dtype="float32"),
            made.topology,
            4096,
        ).bytes_needed.sum()
    )


@pytest.mark.parametrize("family", ["qwen3", *EXPERTS])
def test_parts_fill_each_parameter_of_a_quantised_server_once(family: str) -> None:
    for parameter in Geometry.of(model_of(family), 0, 1, format=BLOCKS).parameters():
        filled = torch.zeros(parameter.shape)
        for part in parameter.parts:
            shape = (*[1] * (len(part.at) - len(part.box.shape)), *part.box.shape)
            filled[tuple(slice(at, at + size) for at, size in zip(part.at, shape, strict=True))] += 1
        assert filled.unique().tolist() == [1], parameter.name


@pytest.mark.parametrize(
    ("family", "format"), [*((f, BLOCKS) for f in ("qwen3", *EXPERTS)), ("qwen3", GROUPS), ("qwen3_moe", GROUPS)]
)
def test_preflight_counts_the_bytes_of_a_quantised_server(family: str, format: ServedFormat) -> None:
    config = model_of(family, vocab_size=8192)
    parameters = Geometry.of(config, 0, 1, format=format).parameters()
    counted = sum(
        math.prod(p.shape) * dtype_of(format.served_dtype_of(p.parts[0].box.name, "bfloat16")).itemsize
        for p in parameters
    )
    assert server_memory(config, 1, "bfloat16", 0, format).weights == pytest.approx(counted, rel=0.002)


def test_the_buffers_stay_and_follow_the_weights() -> None:
    config = model_of(num_hidden_layers=1)
    checkpoint = weights(config)
    source = QuantisedWeights(RankWeights(config, LAYOUTS[0], next(iter(places(LAYOUTS[0]))), checkpoint), BLOCKS)
    before = {shard.name: (shard.view.data_ptr(), bits(shard.view).clone()) for shard in source.shards()}
    name = "model.layers.0.self_attn.k_proj.weight"
    checkpoint[name] *= 3
    after = {shard.name: (shard.view.data_ptr(), bits(shard.view)) for shard in source.shards()}
    assert {n for n in before if before[n][0] != after[n][0]} == set()
    assert {n for n in before if not torch.equal(before[n][1], after[n][1])} == {name + SCALE}
    assert dict(source.named_weights()).keys() == before.keys()
    assert sum(BLOCKS.quantises(n) for n in before) == 7


def test_parts_that_cut_a_block_are_refused_with_their_sizes() -> None:
    narrow = model_of(num_key_value_heads=2)  # 64 rows of k and v for each of two ranks
    server = r"server ranks at server.tp_size=2 hold rows 0 to 64 of self_attn.k_proj.weight, no whole blocks"
    with pytest.raises(UserError, match=server):
        server_holdings(narrow, tp_size=2, format=BLOCKS)
    sources = source_holdings(world_table(narrow, ParallelConfig(tp_size=2)))
    with pytest.raises(
        UserError, match=r"trainer ranks at parallel.tp_size=2 hold rows 0 to 64 of model.layers.0.self"
    ):
        quantised_sources(sources, BLOCKS, ParallelConfig(tp_size=2))
    with pytest.raises(UserError, match=r"hold rows 0 to 192 of mlp.gate_proj.weight, no whole blocks"):
        server_holdings(model_of(intermediate_size=384), tp_size=2, format=BLOCKS)
    narrow = model_of("qwen3_moe", moe_intermediate_size=128, num_key_value_heads=8)
    sizes = "no whole blocks; take an etp_size or sglang.ep_size that leaves multiples of 128"
    with pytest.raises(UserError, match=f"hold rows 0 to 64 of mlp.experts.0.gate_proj.weight, {sizes}"):
        server_holdings(narrow, tp_size=2, format=BLOCKS)
    with pytest.raises(UserError, match=r"server.tp_size=4 and sglang.ep_size=2 hold rows 0 to 64 of mlp.experts.0.g"):
        server_holdings(narrow, tp_size=4, ep_size=2, format=BLOCKS)
    server_holdings(narrow, tp_size=2, ep_size=2, format=BLOCKS)
    layout = ParallelConfig(dp_size=2, etp_size=2)
    with pytest.raises(UserError, match=r"parallel.etp_size=2 hold rows 0 to 64 of model.layers.0.mlp.experts.0.gate"):
        quantised_sources(source_holdings(world_table(narrow, layout)), BLOCKS, layout)
    with pytest.raises(UserError, match=r"rows 0 to 192 of self_attn.q_a_proj.weight, no whole blocks; take a tensor"):
        server_holdings(model_of("deepseek_v3", q_lora_rank=192), tp_size=1, format=BLOCKS)
    with pytest.raises(UserError, match="fp8_channel is for models of llama, mistral, qwen2, qwen3, not qwen3_moe"):
        server_holdings(narrow, tp_size=1, format=CHANNELS)
    for sizes, what in (
        ({"intermediate_size": 384}, "columns 0 to 192 of mlp.down_proj.weight"),
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "columns 0 to 64 of self_attn.o_proj.weight"),
    ):
        with pytest.raises(
            UserError, match=f"int4 has blocks of 1 x 128, .* {what}, no whole blocks; .* multiples of 128"
        ):
            server_holdings(model_of(**sizes), tp_size=2, format=GROUPS)
    with pytest.raises(UserError, match=r"int4 is for models of llama, .*mixtral, not deepseek_v3"):
        server_holdings(model_of("deepseek_v3"), tp_size=1, format=GROUPS)
    with pytest.raises(UserError, match="hold 2 pieces of w with gaps"):
        merged([Box("w", (0, 0), (128, 128)), Box("w", (256, 0), (384, 128))], BLOCKS, "trainer ranks")
    with pytest.raises(UserError, match=r"is for models of llama, .*qwen3_moe.*, not gpt_oss; set it to none"):
        server_holdings(config_of("gpt_oss"), tp_size=1, format=BLOCKS)


def live_parameters(config: Any) -> dict[str, Tensor]:
    """Parameters of a quantised server of one rank."""
    geometry = Geometry.of(config, 0, 1, format=BLOCKS)
    dtypes = {True: torch.float8_e4m3fn, False: torch.float32}
    return {
        p.name: torch.zeros(p.shape, dtype=dtypes[BLOCKS.quantises(p.parts[0].box.name)]) for p in geometry.parameters()
    }


@pytest.mark.parametrize(("family", "format"), [("qwen3", BLOCKS), ("qwen3_moe", BLOCKS), ("qwen3_moe", GROUPS)])
def test_the_parts_of_a_quantised_server_fill_its_parameters_once(family: str, format: ServedFormat) -> None:
    geometry = Geometry.of(model_of(family, num_hidden_layers=1), 0, 2, format=format)
    live = {p.name: torch.zeros(p.shape) for p in geometry.parameters()}
    for parameter in geometry.parameters():
        for part in parameter.parts:
            view_of(part, live[parameter.name]).add_(1)
    padded = {name for name, tensor in live.items() if not bool((tensor == 1).all())}
    assert padded <= {"model.embed_tokens.weight", "lm_head.weight"}


def test_a_live_server_with_other_scales_or_weights_is_refused() -> None:
    config = model_of(num_hidden_layers=1)
    geometry, name = Geometry.of(config, 0, 1, format=BLOCKS), "model.layers.0.self_attn.o_proj.weight"
    live = live_parameters(config) | {"model.layers.0.self_attn.attn.k_scale": torch.ones(())}
    transposed = live | {name: live[name].t() for name in live if name.endswith("proj.weight")}
    views = [(f.box, f.view.shape) for f in live_fragments(transposed.items(), geometry)]
    assert views == [(f.box, f.view.shape) for f in live_fragments(live.items(), geometry)], "as with scales of rows"
    fragments = list(live_fragments(live.items(), geometry))
    assert len(fragments) == 2 * 7 + 7
    for fragment in fragments:
        fragment.view.fill_(1)
    assert all(bool((tensor.float() == 1).all()) for tensor in live.values()), "the parts fill the parameters"
    with pytest.raises(LayoutError, match=f"{name} in bfloat16, and fp8 has it in float8_e4m3fn"):
        list(live_fragments((live | {name: live[name].bfloat16()}).items(), geometry))
    rounded = live[name + SCALE].clone()
    rounded.format_ue8m0 = True  # type: ignore[attr-defined]
    with pytest.raises(LayoutError, match=r"rounded .*o_proj.weight_scale_inv to powers of two"):
        list(live_fragments((live | {name + SCALE: rounded}).items(), geometry))
    with pytest.raises(LayoutError, match=f"holds no {name}{SCALE}"):
        list(live_fragments(((n, p) for n, p in live.items() if n != name + SCALE), geometry))


def test_a_live_model_in_block_fp8_is_taken_unless_it_is_repacked() -> None:
    model = nn.Module()
    model.config = SimpleNamespace(quantization_config=dict(BLOCKS.config))
    model.layer = nn.Module()
    model.layer.quant_method = SimpleNamespace(quant_config=object(), use_marlin=False)
    check_plain(model)
    model.layer.quant_method.use_marlin = True
    with pytest.raises(LayoutError, match="layer packed for Marlin"):
        check_plain(model)
    model.layer.quant_method.use_marlin = False
    model.config.quantization_config["weight_block_size"] = [32, 32]
    with pytest.raises(LayoutError, match="serves layer quantized"):
        check_plain(model)
