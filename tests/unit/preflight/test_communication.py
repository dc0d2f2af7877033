"""Bytes, seconds and exposed seconds of each dimension of a layout, against figures worked out by hand."""

from __future__ import annotations

from math import comb

import pytest

from megarl.actor.sizes.parameter_counts import rank_parameters
from megarl.parallel.config import ParallelConfig
from megarl.preflight.communication import Communication, in_pieces
from tests.unit.preflight.test_trainer_time import DENSE, EXPERTS, TOKENS, model_of, times

START, NODE, NETWORK, FLOPS = 2e-5, 450e9, 50e9, 989e12 * 0.35
SLOW, SLOW_NODE = "cluster.node_gb_s=200", 200e9  # a link that the smallest product does not hide
COUNT = 512  # microbatches of 9216 tokens in a step, in 4 optimizer steps
STAGE = 20  # layers
FILL, DRAIN = 1 + 3 / COUNT, 1 + 3 / (COUNT / 4)  # with the bubble of four stages: of scoring, of an update
ONE_CP = [*DENSE, "parallel.cp_size=1"]
# Of Llama-3.3-70B on 8 tp ranks, seconds of a microbatch's products: QKV, output, gate and up, down.
QKV, OUT, UP, DOWN = (
    2 * (TOKENS / COUNT) * 8192 * rows / 8 / FLOPS for rows in (8192 + 2 * 1024, 8192, 2 * 28672, 28672)
)


def traffic(*overrides: str) -> Communication:
    return times(*overrides).communication


def test_tp_exposes_forward_and_hides_two_of_three_collectives_of_backward_beside_products() -> None:
    found, part = traffic(*ONE_CP, SLOW).tp, 7 / 8 * TOKENS / COUNT * 8192 * 2
    x = START + part / SLOW_NODE
    assert QKV < x < UP  # so the MLP's are hidden, and QKV's in part
    backward = (x + 2 * (x - QKV)) + x
    assert found.exposed == pytest.approx(COUNT * STAGE * (4 * x * FILL + (4 * x + backward) * DRAIN))
    assert found.seconds == pytest.approx(COUNT * STAGE * (4 + 4 + 6) * x)
    assert found.nbytes == pytest.approx(COUNT * STAGE * (4 + 4 + 6) * part)
    assert found.least == pytest.approx(COUNT * STAGE * 12 * part)
    far = traffic(*ONE_CP, "cluster.gpus_per_node=4").tp.seconds  # over the network
    assert far == pytest.approx(COUNT * STAGE * 14 * (START + part / NETWORK))


def test_tp_without_sequence_parallelism_reduces_to_all_ranks_and_hides_it_beside_weight_gradients() -> None:
    found, part = traffic(*ONE_CP, SLOW, "parallel.sequence_parallel=false").tp, 7 / 8 * TOKENS / COUNT * 8192 * 2
    reduce_s = START + 2 * part / SLOW_NODE
    backward = (reduce_s - QKV) + max(0, reduce_s - UP)
    assert found.exposed == pytest.approx(COUNT * STAGE * (2 * reduce_s * FILL + (2 * reduce_s + backward) * DRAIN))
    assert found.nbytes == found.least == pytest.approx(COUNT * STAGE * 12 * part)


def test_userbuffers_expose_a_piece_and_pad_every_microbatch() -> None:
    found, filled = traffic(*ONE_CP, SLOW, "parallel.tp_comm_overlap=true").tp, 129 / 128  # of an optimizer step
    count = 4 * 129
    x = START + 7 / 8 * 9216 * 8192 * 2 / SLOW_NODE
    ahead = in_pieces(x, QKV, 8) + in_pieces(x, OUT, 4) + in_pieces(x, UP, 8) + in_pieces(x, DOWN, 4)
    back = in_pieces(x, OUT, 8) + in_pieces(x, DOWN, 8) + 2 * (x - QKV)
    assert found.exposed == pytest.approx(
        count * STAGE * (ahead * (1 + 3 / count) + (ahead + back) * (1 + 3 / 129)), rel=1e-6
    )
    assert found.nbytes / found.least == pytest.approx(14 / 12 * filled)
    assert in_pieces(3.0, 2.0, 4) == 1.5  # 1 above the product, and a quarter of it
    assert in_pieces(2.0, 8.0, 4) == 0.5
    plain = times(*ONE_CP)
    assert times(*ONE_CP, "parallel.tp_comm_overlap=true").scoring / plain.scoring == pytest.approx(
        filled * (1 + 3 / count) / FILL
    )
    off = traffic(*ONE_CP, SLOW, "parallel.tp_comm_overlap=true", "actor.backend=torch").tp
    assert off.exposed > 1.3 * found.exposed  # Megatron's own layers have no userbuffers


def test_recomputation_moves_again_what_it_repeats() -> None:
    once = traffic(*DENSE)
    full, selective = (traffic(*DENSE, f"actor.recompute={mode}") for mode in ("full", "selective"))
    assert full.tp.nbytes / once.tp.nbytes == pytest.approx((4 + 4 + 6 + 4) / 14)
    assert full.cp.nbytes / once.cp.nbytes == pytest.approx((1 + 1 + 2 + 1) / 4)
    assert (full.tp.least, full.cp.least, full.pp) == (once.tp.least, once.cp.least, once.pp)
    assert (selective.tp, selective.cp) == (once.tp, once.cp)  # Transformer Engine repeats no product
    plain = [traffic(*DENSE, "actor.backend=torch", f"actor.recompute={mode}") for mode in ("none", "selective")]
    assert plain[1].tp.nbytes / plain[0].tp.nbytes == pytest.approx((4 + 4 + 6 + 2) / 14)  # the MLP's two
    assert plain[1].cp.nbytes / plain[0].cp.nbytes == pytest.approx(4 / 3)


@pytest.mark.parametrize("cp", [2, 4])
def test_cp_rings_hide_beside_attention_and_a_gather_does_not(cp: int) -> None:
    layout = [*DENSE, f"parallel.cp_size={cp}"]
    ring, gather = traffic(*layout).cp, traffic(*layout, "actor.backend=torch").cp
    part = TOKENS / COUNT / cp * 2 * 128 * 2  # one KV head a rank; keys and values
    x, both = START + part / NETWORK, START + 2 * part / NETWORK
    core = 2 * 80 * 8192 * 2304**2 * 2048 / 80 / 8 / cp / COUNT / FLOPS  # attention of a layer on a rank
    step = core / cp
    forward, others = (cp - 1) * max(0, x - step), cp - 1
    backward = 2 * max(0, x - 2 * step) + (cp - 2) * max(0, both - 2 * step)
    assert ring.exposed == pytest.approx(COUNT * STAGE * (forward * FILL + (forward + backward) * DRAIN))
    assert ring.seconds == pytest.approx(COUNT * STAGE * (2 * others * x + 2 * x + (cp - 2) * both))
    assert ring.nbytes == pytest.approx(COUNT * STAGE * 4 * others * part)
    assert gather.exposed == pytest.approx(COUNT * STAGE * (START + others * part / NETWORK) * (FILL + 2 * DRAIN))
    assert gather.nbytes == pytest.approx(COUNT * STAGE * 3 * others * part)
    assert ring.least == gather.least == pytest.approx(COUNT * STAGE * 3 * 0.75 * others * part)


def test_causal_chunks_in_zigzag_order_need_three_quarters_of_the_other_ranks_keys() -> None:
    for cp in (2, 4, 8):
        needed = [len(set(range(2 * cp - r)) - {r, 2 * cp - 1 - r}) for r in range(cp)]  # chunks up to its later one
        assert sum(needed) / cp == 0.75 * 2 * (cp - 1)


def test_ep_moves_a_vector_to_each_expert_and_flex_to_each_rank_with_some() -> None:
    # 94 layers over 10 stages, of at most 10; dp 2, tp 4; 4 x 72 microbatches of 8192 tokens
    count, layers = 4 * 72, 10
    vector = TOKENS / 2 / 4 / count * 4096 * 2
    fill, drain = 1 + 9 / count, 1 + 9 / 72
    found, flex = traffic(*EXPERTS).ep, traffic(*EXPERTS, "actor.moe_dispatcher=flex").ep
    x = START + 7 / 8 * 8 * vector / NODE
    assert found.seconds == pytest.approx(count * layers * 3 * 2 * x)
    assert found.exposed == pytest.approx(count * layers * 2 * x * (fill + 2 * drain))
    met = 1 - comb(112, 8) / comb(128, 8)  # of a rank's 16 experts, 8 are chosen of 128
    assert flex.nbytes == flex.least == found.least == pytest.approx(count * layers * 3 * 2 * 7 * met * vector)
    assert found.nbytes / found.least == pytest.approx(8 / 8 / met)
    far = traffic(*EXPERTS, "parallel.dp_size=4", "parallel.ep_size=16").ep
    assert far.seconds > found.seconds  # half of the exchange leaves the node
    whole = traffic(*EXPERTS, "parallel.ep_size=1", "parallel.etp_size=4").ep
    assert whole.nbytes / whole.least == pytest.approx(8)  # each of a token's 8 copies to the other three ranks


SHARED = ["+experiment=grpo_moe_235b", "model=glm4_5_air", "actor.recompute=none", "parallel.pp_size=1"]
SHARED += ["parallel.first_stage_layers=0", "parallel.last_stage_layers=0"]


def test_shared_experts_hide_exchanges_where_they_run_beside_them() -> None:
    found = traffic(*SHARED).ep
    for off in ("parallel.overlap=false", "actor.backend=torch", "parallel.tp_comm_overlap=true", "actor.lora.rank=8"):
        exposed = traffic(*SHARED, off).ep
        assert exposed.exposed == pytest.approx(exposed.seconds, rel=1e-9), off
    # 45 of 46 layers have experts: the shared one is 1408 wide, on 4096 features
    tokens = TOKENS / 2 / 288
    second = 2 * tokens * 4096 * 1408 / 4 / FLOPS
    x = found.seconds / (288 * 45 * 6)
    assert x == pytest.approx(START + 7 / 8 * 8 * tokens / 4 * 4096 * 2 / NODE)
    hidden = 2 * (min(x, 2 * second) + min(x, second)) + min(x, 4 * second) + min(x, 2 * second)
    assert found.exposed == pytest.approx(288 * 45 * (6 * x - hidden))


def test_stages_wait_for_each_other_and_virtual_ones_only_while_the_pipeline_fills() -> None:
    found = traffic(*DENSE).pp
    part = TOKENS / 2 / COUNT * 8192 * 2 / 8  # cp, tp
    x = START + part / NETWORK
    assert found.seconds == pytest.approx(COUNT * 3 * x)
    assert found.exposed == pytest.approx(COUNT * x * (FILL + 2 * DRAIN))
    virtual = times(*DENSE, "parallel.vpp_size=4").communication.pp
    filling = (2 * 3 + 3 * 4) / (128 * 4)
    assert virtual.exposed == pytest.approx(COUNT * 4 * x * ((1 + 3 / (4 * COUNT)) + 2 * filling * (1 + 3 / (4 * 128))))
    assert virtual.nbytes == pytest.approx(4 * found.nbytes)
    whole = traffic(*DENSE, "parallel.sequence_parallel=false").pp
    assert whole.nbytes / whole.least == pytest.approx(8)  # all tp ranks send the same


def test_virtual_stages_take_a_multiple_of_the_stages_microbatches() -> None:
    odd = "actor.max_tokens_per_mb=9300"  # 126.8 of them fill an optimizer step
    assert times(*DENSE, odd, "parallel.vpp_size=2").bubble == pytest.approx(3 / (128 * 2))
    assert times(*DENSE, odd).bubble == pytest.approx(3 / 127)


SFT = "+experiment=sft_8b"


def test_replicas_hide_all_but_the_last_bucket_beside_a_microbatch() -> None:
    _, model = model_of(SFT)
    held = rank_parameters(model, ParallelConfig(tp_size=2, dp_size=4, sequence_parallel=True), 0).dense
    assert held == pytest.approx(8.03e9 / 2, rel=0.01)
    found, moved = traffic(SFT), 3 / 4 * held
    buckets = -(-held // 40_000_000)
    assert found.dp.nbytes == found.dp.least == pytest.approx(moved * (4 + 2))
    assert found.dp.seconds == pytest.approx(2 * buckets * START + moved * 6 / NODE)
    embedding = 3 / 4 * 128256 * 4096 / 2
    assert found.dp.exposed == pytest.approx(2 * START + embedding * 6 / NODE)
    assert traffic(SFT, "parallel.overlap=false").dp.exposed == pytest.approx(2 * START + moved * 6 / NODE)
    slow = traffic(SFT, "cluster.node_gb_s=0.9").dp  # no microbatch hides so much
    work = times(SFT, "cluster.node_gb_s=0.9")
    a_microbatch = work.update / (128 * 2048 / 4 / 8192)
    assert slow.exposed == pytest.approx(slow.seconds - a_microbatch, rel=1e-3)
    assert found.pp.nbytes == found.ep.nbytes == found.cp.nbytes == 0


def test_stages_behind_the_first_gather_one_after_another_and_a_run_with_servers_before_it_sends() -> None:
    layout = ParallelConfig(tp_size=8, pp_size=4, dp_size=2, sequence_parallel=True)
    _, model = model_of(*DENSE)
    held = rank_parameters(model, layout, 0).dense
    found = traffic(*ONE_CP, "parallel.dp_size=2").dp
    buckets = -(-held // 40_000_000)
    gather = buckets * START + held / 2 * 2 / NETWORK
    embedding = 128256 * 8192 / 8 / 2
    first, last = (START + embedding * size / NETWORK for size in (2, 4))
    assert found.exposed == pytest.approx(4 * last + 3 * (first + 3 * gather) + gather)
    assert found.seconds == pytest.approx(4 * (2 * buckets * START + held / 2 * 6 / NETWORK))


def test_only_adapters_are_reduced_where_they_alone_are_trained() -> None:
    found, whole = traffic(SFT, "actor.lora.rank=8").dp, traffic(SFT).dp
    assert found.nbytes < 0.01 * whole.nbytes
    plain = times(SFT, "actor.lora.rank=8")
    assert plain.update == pytest.approx(2 / 3 * times(SFT).update, rel=0.01)  # no gradients of the weights
    tp, trained = plain.communication.tp, times(SFT).communication.tp
    assert tp.exposed == pytest.approx(tp.seconds)  # backward has no products of weight gradients to hide beside
    assert tp.nbytes == pytest.approx(8 / 10 * trained.nbytes) == tp.least
