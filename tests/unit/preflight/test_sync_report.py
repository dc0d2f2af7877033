"""A plan's figures add up its transfers, and the tables show them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from transformers import Qwen3MoeConfig

from megarl.actor.weights.shards import tensor_shapes, world_table
from megarl.parallel.config import ParallelConfig
from megarl.preflight.sync_report import duration, render, size, summarise
from megarl.reshard.plan.holdings import Box, Holdings, Topology
from megarl.reshard.plan.megatron_layout import source_holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.sglang_layout import server_holdings
from megarl.reshard.plan.transfer_plan import TransferPlan

CONFIG = Qwen3MoeConfig(
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    hidden_size=32,
    moe_intermediate_size=16,
    num_experts=4,
    vocab_size=200,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def made() -> TransferPlan:
    sources = source_holdings(world_table(CONFIG, ParallelConfig(tp_size=2, pp_size=2, dp_size=2, ep_size=2)))
    destinations = server_holdings(CONFIG, tp_size=2, n_servers=3, dtype="bfloat16")
    return plan(sources, destinations, Topology.of_sizes(8, [2] * 3, 4, first=4), 4096)


def test_the_figures_add_up_the_transfers(made: TransferPlan) -> None:
    summary = summarise(made)
    for rank in range(8):
        sent = list(made.sends(rank))
        assert summary.sent.nbytes[rank] == sum(t.nbytes for t in sent)
        assert summary.sent.messages[rank] == len(sent)
        assert summary.sent.peers[rank] == len({t.peer for t in sent})
    near = 0
    for rank in range(6):
        got = list(made.receives(rank))
        assert summary.received.nbytes[rank] == sum(t.nbytes for t in got) == summary.needed[rank]
        assert summary.received.messages[rank] == len(got)
        assert summary.received.peers[rank] == len({t.peer for t in got})
        near += sum(t.nbytes for t in got if made.topology.source_node[t.peer] == made.topology.node[rank])
    assert summary.same_node_bytes == near > 0
    assert summary.ratio == 1.0
    assert summary.full_bytes == 2 * sum(a * (b or [1])[0] for a, *b in tensor_shapes(CONFIG).values())
    assert summary.saving == pytest.approx(summary.full_bytes * 6 / summary.needed.sum())
    busiest = max(summary.sent.nbytes.max(), summary.received.nbytes.max())
    assert summary.seconds(1e6) == busiest / 1e6


def test_a_rank_that_must_send_more_than_others_shows_as_imbalance() -> None:
    big, small = (Box("big", (0,), (300,)), "float32"), (Box("small", (0,), (100,)), "float32")
    apart = plan(Holdings.of([[big], [small]]), Holdings.of([[big, small]]), Topology.of_sizes(2, [1], 8), 4096)
    assert summarise(apart).sent.imbalance == 1.5
    assert summarise(apart).full_bytes == 1600


def test_the_tables_show_every_figure(made: TransferPlan) -> None:
    out, summary = io.StringIO(), summarise(made)
    Console(file=out, width=120).print(render(made, bandwidth=2e6, transports="gloo to 3 servers"))
    text = out.getvalue()
    for shown in (
        "8 trainer ranks, 3 servers of 2",
        "gloo to 3 servers",
        f"{len(made.sources.names)}, {size(summary.full_bytes)}",
        "1.00: each server rank receives what it holds, once",
        f"{len(made.buckets.nbytes)} of 4.1 kB",
        f"at least {duration(summary.seconds(2e6))} at 0.002 GB/s a rank",
        made.hash[:16],
        "nothing",
        f"{summary.sent.imbalance:.2f}",
        f"{summary.full_bytes / summary.needed.min():.2f} x",
        duration(summary.full_bytes / 2e6),
    ):
        assert shown in text, shown
    listed = text.partition("Server ranks, receiving")[2].partition("Against")[0]
    assert [line.split("│")[1].strip() for line in listed.splitlines() if "kB" in line] == list("012345")


def test_sides_with_many_ranks_are_summed_up() -> None:
    whole = (Box("w", (0,), (400,)), "float32")
    many = plan(Holdings.of([[whole]] * 17), Holdings.of([[whole]]), Topology.of_sizes(17, [1], 8), 4096)
    out = io.StringIO()
    Console(file=out, width=120).print(render(many, 1e9, "gloo"))
    assert "Trainer ranks, sending" not in out.getvalue()
    assert "Server ranks, receiving" in out.getvalue()


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.04e9, "2.0 GB"), (3.1e12, "3.1 TB")]
)
def test_sizes_are_decimal(nbytes: float, text: str) -> None:
    assert size(int(nbytes)) == text


def test_durations_below_a_second_are_in_milliseconds() -> None:
    assert duration(2.35) == "2.4 s"
    assert duration(0.0124) == "12.4 ms"


def test_bytes_that_servers_send_on_are_not_the_trainers_and_bound_the_time_too() -> None:
    """One trainer rank, a chain of servers on other nodes: the first relay sends on twice what it receives."""
    everything = [(Box("a", (0,), (64,)), "float32")]
    relayed = plan(
        Holdings.of([everything]), Holdings.of([everything] * 3), Topology.of_sizes(1, [1] * 3, 1), 256, relay="1"
    )
    summary = summarise(relayed)
    assert summary.sent.nbytes.tolist() == [256]
    assert summary.sent.peers.tolist() == [1]
    assert sorted(summary.forwarded.tolist()) == [0, 0, 512]
    assert summary.received.peers.tolist() == [1, 1, 1]
    assert summary.seconds(1.0) == 512
    out = io.StringIO()
    Console(file=out, width=120).print(render(relayed, bandwidth=2e6, transports="gloo to 3 servers"))
    assert "servers send 67% of it, at most 512 B a rank" in out.getvalue()
