"""Traffic of a training step by dimension of the layout: bytes, seconds, and the seconds that compute does not hide.

A GPU receives, for T tokens of its part of the step, in each forward pass (n ranks, h hidden features, b bytes each):

    tp   (n - 1) / n T h b for each all-gather and reduce-scatter, around a pair of products (attention, MLP)
    cp   (n - 1) T 2 kv_heads / tp head_dim b a layer: keys and values of the other ranks
    ep   (n - 1) / n T / tp topk h b a layer with experts, to them and back. actor.moe_dispatcher=flex sends a token
         once to each rank with some of its k of E experts: to 1 - C(E - E/n, k) / C(E, k) of the n
    pp   T h b, with sequence_parallel / tp, for each virtual stage
    dp   (n - 1) / n of the float32 gradients and of the updated parameters, an optimizer step

Backward moves as much, with two exceptions. Under sequence_parallel, tp gathers the input once more for its weight's
gradient. Ring exchanges of cp carry keys and values again, beside their gradients. Recomputation repeats forward.

A collective of x seconds = COLLECTIVE_S + bytes / link that runs beside g seconds of compute is exposed by

    alone      x                                 the next operation waits for it
    beside     max(0, x - g)
    in pieces  max(0, x - g) + min(x, g) / n     its n pieces feed a product; one of them has no compute beside it

This is what the actor's configuration does (Megatron-core 0.19.2; Transformer Engine's main branch, August 2026):

    tp   Forward alone. In backward the second gather runs beside the product for the input's gradient, its reduction
         beside that for the weight's (layers.py:611-655 of Megatron, TE's linear.py), where weights are trained.
         parallel.tp_comm_overlap, with Transformer Engine: before the first product and for gradients of the second in
         tp pieces, behind the second in 4 (`initialize_ub` of TE). Microbatches are padded, so more is moved.
    cp   Transformer Engine: each of the n - 1 exchanges beside 1/n of the rank's attention; in backward keys, values
         and their gradients beside twice of it (context_parallel.py, `AttnFuncWithCPAndKVP2P`). Other layers gather
         all keys first: alone.
    ep   Alone. With shared experts, parallel.overlap and Transformer Engine: there beside their first product, back
         beside their second (token_dispatcher.py:652-710, 854-866).
    pp   Alone: a stage waits for what it sends and receives. With vpp_size above 1 only while the pipeline fills and
         drains, 2 (p - 1) + (v - 1) p of m v exchanges each way (schedules.py:937), else beside a virtual stage's pass.
         Passes without backward do nothing but fill it.
    dp   parallel.overlap: gradients beside the last microbatch's backward, parameters beside the first one's forward,
         but for the bucket of the embedding and the first layers. Stages behind the first gather in one bucket, each
         once activations reach it: one after another. A run whose weights go to servers gathers the last parameters
         before it sends them: alone

Exposed seconds of tp, cp, ep and pp are multiplied by 1 + the pipeline's bubble, as compute is.

`least` is a lower bound for the layout: each exchange that the split needs, once a pass, without recomputation, padding
or copies of one thing to one rank. (n - 1) / n of the data is the bound of all-gather and reduce-scatter (Chan et al.
2007, Collective communication: theory, practice, and experience). Causal attention over zigzag chunks needs 3/4 of the
other ranks' keys, and in backward as much of their gradients alone. ep's is what flex moves; pp's has tp ranks send
different parts.

Not counted: embedding and head, norms' gradients, adapters' own products, tokens' routes, cp of gated delta nets, and
that compute and collectives slow each other down.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

from megarl.actor.sizes.memory import GRADIENT
from megarl.actor.sizes.parameter_counts import RankParameters
from megarl.config import ClusterConfig
from megarl.families.blocks import Experts
from megarl.parallel.config import ParallelConfig
from megarl.preflight.trainer_work import TrainerWork

COLLECTIVE_S = 2e-5  # start of one collective or exchange. Assumed, not measured
PIPELINED = 4  # pieces of a reduction that userbuffers hide: `num_splits` of Transformer Engine's `initialize_ub`
LEAST_BUCKET, BUCKET_A_REPLICA = 40_000_000, 1_000_000  # parameters: distributed_data_parallel.py:69 of Megatron


@dataclass(frozen=True)
class Moved:
    """Traffic of one GPU in a step, in one dimension. Bytes are received ones."""

    nbytes: float = 0.0
    least: float = 0.0  # bytes, a lower bound
    seconds: float = 0.0  # of all collectives, one after another
    exposed: float = 0.0  # seconds that compute does not hide

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, count: float, bubble: float = 0.0) -> Moved:
        """Multiplies the traffic by `count`, and exposed seconds also by 1 + the pipeline's `bubble`."""
        return Moved(self.nbytes * count, self.least * count, self.seconds * count, self.exposed * count * (1 + bubble))


NOTHING = Moved()


@dataclass(frozen=True)
class Communication:
    """Traffic of a step by dimension of the layout."""

    tp: Moved = NOTHING
    cp: Moved = NOTHING
    ep: Moved = NOTHING
    pp: Moved = NOTHING
    dp: Moved = NOTHING

    def parts(self) -> dict[str, Moved]:
        """Traffic of the dimensions that have some."""
        return {name: moved for name, moved in vars(self).items() if moved.nbytes}

    @property
    def exposed(self) -> float:
        return self.tp.exposed + self.cp.exposed + self.ep.exposed + self.pp.exposed + self.dp.exposed

    def __add__(self, other: Communication) -> Communication:
        return Communication(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Passes:
    """Passes of a step over all its tokens, and the pipeline's bubble in them."""

    forward: float
    backward: int
    again: str  # recompute mode of backward
    bubble: float

    def repeated(self, selective: bool) -> float:
        """Forward passes, with those that backward repeats; `selective`: recompute=selective repeats this part."""
        return self.forward + self.backward * (self.again == "full" or (self.again == "selective" and selective))


@dataclass(frozen=True)
class Share:
    """The part of a step of a rank on the slowest pipeline stage, for one model."""

    work: TrainerWork
    parallel: ParallelConfig
    dp: int  # resolved
    layers: int  # of the stage
    per_update: int  # microbatches of an optimizer step
    padded: float  # tokens computed over real ones: above 1 where microbatches are filled up
    forward_s: float  # compute of a forward pass over the step's tokens
    backward_s: float
    parameters: RankParameters

    @functools.cached_property
    def tokens(self) -> float:
        """Real tokens of a microbatch, before tp cuts them."""
        return self.work.sequences * self.work.mean / self.dp / self.parallel.cp_size / self.count

    @functools.cached_property
    def per_second(self) -> float:
        """Elements of weights that are multiplied with a microbatch's tokens in a second, padding included."""
        return self.work.flops / (2 * self.tokens * self.padded)

    @functools.cached_property
    def count(self) -> int:
        """Microbatches of a step."""
        return self.work.minibatches * self.per_update

    @property
    def visits(self) -> int:
        """Layers that microbatches pass in a step."""
        return self.count * self.layers

    @property
    def overlap(self) -> bool:
        """`parallel.overlap`, whose default is on where GPUs are planned for."""
        return self.parallel.overlap is not False

    def link(self, ranks: int) -> float:
        """Bytes/s each way between `ranks` neighbours."""
        return _link(self.work.cluster, ranks)


def communication(share: Share, passes: Passes) -> Communication:
    """Traffic of `passes` of one model. Passes with backward update it, and move its gradients and parameters too."""
    visits, bubble = share.visits, passes.bubble
    return Communication(
        tp=_tensor(share, passes).times(visits, bubble),
        cp=_context(share, passes).times(visits, bubble),
        ep=_experts(share, passes).times(visits, bubble),
        pp=_stages(share, passes).times(share.count, bubble),
        dp=_replicas(share).times(passes.backward) if passes.backward else NOTHING,
    )


def beside(seconds: float, compute: float) -> float:
    return max(0.0, seconds - compute)


def in_pieces(seconds: float, compute: float, pieces: int) -> float:
    return beside(seconds, compute) + min(seconds, compute) / pieces


def _tensor(share: Share, passes: Passes) -> Moved:
    """Tensor parallelism of one layer and microbatch. Without sequence_parallel two collectives are one all-reduce."""
    tp, parallel, work = share.parallel.tp_size, share.parallel, share.work
    if tp == 1:
        return NOTHING
    part = (tp - 1) / tp * share.tokens * work.shape.hidden * work.item
    data, split = part * share.padded, parallel.sequence_parallel
    x = COLLECTIVE_S + data / share.link(tp)
    reduce_s = 2 * x - COLLECTIVE_S
    total = NOTHING
    for pair, each in work.pairs:
        column, row = (elements / tp / share.per_second for elements in (pair.column, pair.row))
        if not split:
            ahead, back = reduce_s, reduce_s if work.frozen else beside(reduce_s, column)
        elif parallel.tp_comm_overlap and work.te:
            ahead = in_pieces(x, column, tp) + in_pieces(x, row, PIPELINED)
            back = in_pieces(x, row, tp) + (x if work.frozen else 2 * beside(x, column))
        else:
            ahead, back = 2 * x, 2 * x if work.frozen else x + 2 * beside(x, column)
        gathers = 3 if split and not work.frozen else 2
        ways = 2 * x if split else reduce_s
        forward, backward = passes.repeated(pair.again), passes.backward
        total += Moved(
            nbytes=(2 * forward + gathers * backward) * data,
            least=2 * (passes.forward + backward) * part,
            seconds=forward * ways + backward * (ways + (gathers - 2) * x),
            exposed=forward * ahead + backward * back,
        ).times(each)
    return total


def _context(share: Share, passes: Passes) -> Moved:
    """Context parallelism of one layer and microbatch."""
    work, cp, tp = share.work, share.parallel.cp_size, share.parallel.tp_size
    if cp == 1:
        return NOTHING
    attention = work.shape.attention
    data = share.tokens * 2 * max(1.0, attention.kv_heads / tp) * attention.head_dim * work.item
    link, others = share.link(tp * cp), cp - 1
    x, both = COLLECTIVE_S + data / link, COLLECTIVE_S + 2 * data / link
    if work.te:
        ranks = tp * cp * share.dp
        step = work.forward * work.core / len(work.shape.attentions) / ranks / share.count / work.flops / cp
        ahead, ahead_s = others * beside(x, step), others * x
        back = 2 * beside(x, 2 * step) + (cp - 2) * beside(both, 2 * step)
        back_s, rounds = 2 * x + (cp - 2) * both, 2
    else:
        ahead = ahead_s = back = back_s = COLLECTIVE_S + others * data / link
        rounds = 1
    forward = passes.repeated(not work.te)
    return Moved(
        nbytes=(forward + rounds * passes.backward) * others * data,
        least=(passes.forward + passes.backward) * 0.75 * others * data,
        seconds=forward * ahead_s + passes.backward * back_s,
        exposed=forward * ahead + passes.backward * back,
    ).times(len(work.shape.attentions) / len(work.shape.layers))


def _experts(share: Share, passes: Passes) -> Moved:
    """Expert parallelism of one layer and microbatch, and the experts' own tensor parallelism."""
    work, moe, ep, etp = share.work, share.work.shape.experts, share.parallel.ep_size, share.parallel.expert_tp_size
    if moe is None or ep * etp == 1:
        return NOTHING
    vector = share.tokens / share.parallel.tp_size * work.shape.hidden * work.item
    once = vector * met(moe, ep) * (ep * etp - 1)
    moved, gathered = vector * moe.topk * (ep - 1) / ep, vector * moe.topk * (etp - 1)
    if work.dispatcher == "flex":
        moved, gathered = once, 0.0
    moved, gathered = moved * share.padded, gathered * share.padded
    cluster, near = work.cluster, min(1.0, max(1, work.cluster.gpus_per_node) / (ep * etp))  # part on the rank's node
    x = COLLECTIVE_S + max(moved * near / _link(cluster, 1), moved * (1 - near) / (cluster.network_gb_s * 1e9))
    inside = gathered / share.link(etp)
    first = second = 0.0
    if work.shared_beside and share.overlap and not share.parallel.tp_comm_overlap:
        second = work.shape.hidden * moe.shared_width / share.parallel.tp_size / share.per_second
        first = 2 * second
    forward, backward = passes.repeated(True), passes.backward
    exposed = forward * (beside(x, first) + beside(x, second))
    exposed += backward * (beside(x, 2 * first) + beside(x, 2 * second))
    return Moved(
        nbytes=2 * (forward + backward) * (moved + gathered),
        least=2 * (passes.forward + backward) * once,
        seconds=2 * (forward + backward) * (x + inside),
        exposed=exposed + 2 * (forward + backward) * inside,
    ).times(sum(work.shape.sparse) / len(work.shape.sparse))


def met(moe: Experts, ep: int) -> float:
    """Share of `ep` ranks that have one of a token's experts, if all choices are equally likely."""
    here = moe.count // ep
    return 1 - math.comb(moe.count - here, moe.topk) / math.comb(moe.count, moe.topk)


def _stages(share: Share, passes: Passes) -> Moved:
    """Exchanges of one microbatch between pipeline stages: of a stage between two others, which receives most."""
    parallel, work = share.parallel, share.work
    pp, vpp, tp = parallel.pp_size, parallel.vpp_size, parallel.tp_size
    if pp == 1:
        return NOTHING
    whole = share.tokens * work.shape.hidden * work.item
    data = whole * share.padded / (tp if parallel.sequence_parallel else 1)
    x = COLLECTIVE_S + data / share.link(tp * parallel.cp_size * share.dp * pp)
    ways = passes.forward + passes.backward
    exposed = ways * x
    if vpp > 1 and passes.backward:
        filling = min(1.0, (2 * (pp - 1) + (vpp - 1) * pp) / (share.per_update * vpp))
        chunks = share.count * vpp
        hidden = passes.forward * beside(x, share.forward_s / chunks)
        hidden += passes.backward * beside(x, share.backward_s / chunks)
        exposed = filling * exposed + (1 - filling) * hidden
    return Moved(ways * data, ways * whole / tp, ways * x, exposed).times(vpp)


def _replicas(share: Share) -> Moved:
    """Gradients and parameters of one model's optimizer steps, on the first pipeline stage, which ends backward last.

    Stages behind it reduce in one bucket while earlier ones still compute.
    """
    work, parallel, held = share.work, share.parallel, share.parameters
    per_stage = parallel.tp_size * parallel.cp_size * share.dp
    link, least_bucket = share.link(per_stage), max(LEAST_BUCKET, BUCKET_A_REPLICA * share.dp)
    embedding = work.shape.vocab * work.shape.hidden // parallel.tp_size
    nbytes = tail = 0.0  # of a byte of each parameter
    collectives = groups = 0
    expert_ranks = parallel.expert_tp_size * parallel.ep_size
    for count, ranks, smallest in (
        (held.trained_dense, per_stage // parallel.tp_size, max(least_bucket, embedding)),
        (held.trained_experts, max(1, per_stage // expert_ranks), least_bucket),
    ):
        if count and ranks > 1:
            part, groups = (ranks - 1) / ranks, groups + 1
            nbytes, tail = nbytes + part * count, tail + part * min(count, smallest)
            collectives += math.ceil(count / least_bucket) if share.overlap else 1
    if not nbytes:
        return NOTHING

    def seconds(nbytes: float, starts: int) -> float:
        return starts * COLLECTIVE_S + nbytes / link

    reduce_s, gather_s = seconds(nbytes * GRADIENT, collectives), seconds(nbytes * work.item, collectives)
    alone = int(work.sends)
    steps, reduced, gathered = work.minibatches, reduce_s, gather_s
    if share.overlap:
        reduced = max(seconds(tail * GRADIENT, groups), beside(reduce_s, share.backward_s / share.count))
        gathered = max(seconds(tail * work.item, groups), beside(gather_s, share.forward_s / share.count))
        gathered += (parallel.pp_size - 1) * gather_s
    return Moved(
        nbytes=steps * nbytes * (GRADIENT + work.item),
        least=steps * nbytes * (GRADIENT + work.item),
        seconds=steps * (reduce_s + gather_s),
        exposed=steps * reduced + (steps - alone) * gathered + alone * gather_s,
    )


def _link(cluster: ClusterConfig, ranks: int) -> float:
    return (cluster.node_gb_s if ranks <= max(1, cluster.gpus_per_node) else cluster.network_gb_s) * 1e9
