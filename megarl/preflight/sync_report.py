"""Cost of a planned weight sync: bytes, peers and messages of every rank, and time at a given bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from megarl.reshard.plan.box_arrays import BoxArray, sum_by
from megarl.reshard.plan.holdings import Ints
from megarl.reshard.plan.transfer_plan import NO_RELAY, TransferPlan
from megarl.reshard.transfer.transports.base import SLOTS

LISTED_RANKS = 16  # larger sides are summarised


@dataclass(frozen=True, eq=False)
class RankTraffic:
    """Traffic of one side's ranks: bytes, peers and messages, each `[ranks]`."""

    nbytes: Ints
    peers: Ints
    messages: Ints

    @property
    def imbalance(self) -> float:
        """The busiest rank's bytes over the mean."""
        return float(self.nbytes.max() / max(self.nbytes.mean(), 1))


@dataclass(frozen=True, eq=False)
class PlanSummary:
    """Figures of a plan. `forwarded [server ranks]` are bytes that a server rank sends on to others.

    `full_bytes` is what each server rank receives if whole tensors are broadcast to all.
    """

    sent: RankTraffic
    received: RankTraffic
    forwarded: Ints
    needed: Ints
    full_bytes: int
    same_node_bytes: int

    @property
    def ratio(self) -> float:
        """Largest ratio of received to held bytes over the server ranks; the optimum is 1."""
        return float((self.received.nbytes / self.needed).max())

    @property
    def saving(self) -> float:
        """Bytes of the full broadcast over the plan's bytes, both summed over the server ranks."""
        return float(self.full_bytes * len(self.needed) / self.received.nbytes.sum())

    def seconds(self, bandwidth: float) -> float:
        """Seconds of the busiest rank at `bandwidth` bytes/s each way. A floor: latency and copies come on top."""
        return float(max(side.max() for side in (self.sent.nbytes, self.received.nbytes, self.forwarded)) / bandwidth)


def summarise(plan: TransferPlan) -> PlanSummary:
    """Adds up a plan's traffic."""
    messages, ranks, sources = plan.messages, len(plan.topology.node), len(plan.topology.source_node)
    direct = messages.relay == NO_RELAY
    sender = np.where(direct, messages.source, sources + messages.relay)
    pairs = np.unique(sender * ranks + messages.destination)
    sending = pairs[pairs < sources * ranks]

    def load(nbytes: Ints, rank_of: Ints, peer_of: Ints) -> RankTraffic:
        peer_count, message_count = (sum_by(index, np.ones_like(index), len(nbytes)) for index in (peer_of, rank_of))
        return RankTraffic(nbytes, peer_count, message_count)

    nodes = np.concatenate([plan.topology.source_node, plan.topology.node])
    near = nodes[sender] == plan.topology.node[messages.destination]
    return PlanSummary(
        sent=load(plan.bytes_out, messages.source[direct], sending // ranks),
        received=load(plan.bytes_in, messages.destination, pairs % ranks),
        forwarded=plan.bytes_forwarded,
        needed=plan.bytes_needed,
        full_bytes=_full_bytes(plan),
        same_node_bytes=int(plan.buckets.nbytes[messages.bucket[near]].sum()),
    )


def _full_bytes(plan: TransferPlan) -> int:
    """Bytes of all tensors that the servers hold, unsharded, in the servers' dtypes."""
    side = plan.destinations
    itemsize = np.zeros(len(plan.sources.names), dtype=np.int64)
    number = {name: i for i, name in enumerate(plan.sources.names)}
    tensor = np.array([number[name] for name in side.names], dtype=np.int64)[side.tensor]
    volume = np.prod(side.stop - side.start, axis=1)
    np.maximum.at(itemsize, tensor, side.nbytes // volume)
    blocks, _ = BoxArray(plan.sources.tensor, plan.sources.start, plan.sources.stop).distinct()
    return int((sum_by(blocks.tensor, blocks.volume, len(itemsize)) * itemsize).sum())


def render(plan: TransferPlan, bandwidth: float, transports: str, whole: TransferPlan | None = None) -> RenderableType:
    """Tables of a plan; `bandwidth` in bytes/s of each rank, each way; `transports` in words.

    `whole` is the plan of all weights, for a sync of adapters alone.
    """
    summary = summarise(plan)
    overview = _overview(plan, summary, bandwidth, transports)
    if whole is not None:
        overview.title = "Sync of adapters, planned"
        all_weights = summarise(whole)
        moved = int(all_weights.received.nbytes.sum())
        ratio = moved / max(int(summary.received.nbytes.sum()), 1)
        overview.add_row(
            "the base",
            f"{size(moved)}, {ratio:.0f} x as much, in {duration(all_weights.seconds(bandwidth))}: once for each start "
            "of a server; at each sync with actor.lora.sync=merged",
        )
    return Group(overview, *_sides(summary), _comparison(summary, bandwidth))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _overview(plan: TransferPlan, summary: PlanSummary, bandwidth: float, transports: str) -> Table:
    table = Table(title="Weight sync, planned", title_justify="left", title_style="bold", show_header=False)
    servers = len(np.unique(plan.topology.server))
    slowest = summary.seconds(bandwidth)
    rows = (
        (
            "from, to",
            f"{len(summary.sent.nbytes)} trainer ranks, {servers} servers of {len(summary.needed) // servers}",
        ),
        ("tensors", f"{len(plan.sources.names):,}, {size(summary.full_bytes)}"),
        ("to move", f"{size(int(summary.received.nbytes.sum()))}, of which within a node {_share(summary)}"),
        ("ratio to lower bound", f"{summary.ratio:.2f}: each server rank receives what it holds, once"),
        ("transport", transports),
        ("relays", _relays(summary)),
        ("buckets", f"{len(plan.buckets.nbytes):,} of {size(plan.bucket_bytes)}, {_filled(plan):.0%} full"),
        ("messages", f"{len(plan.messages.bucket):,}"),
        (
            "staging",
            f"{size(SLOTS * plan.bucket_bytes)} a rank, two buckets" + ("; a relay twice" if plan.is_relayed else ""),
        ),
        ("waived", ", ".join(plan.waived) or "nothing"),
        ("time", f"at least {duration(slowest)} at {bandwidth / 1e9:g} GB/s a rank"),
        ("hash", plan.hash[:16]),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _relays(summary: PlanSummary) -> str:
    """Bytes that servers send on to others, in words."""
    if not summary.forwarded.any():
        return "none: the trainer sends to every server"
    moved = int(summary.received.nbytes.sum())
    share = int(summary.forwarded.sum()) / moved
    return f"servers send {share:.0%} of it, at most {size(int(summary.forwarded.max()))} a rank"


def _share(summary: PlanSummary) -> str:
    return f"{summary.same_node_bytes / max(int(summary.received.nbytes.sum()), 1):.0%}"


def _filled(plan: TransferPlan) -> float:
    return float(plan.buckets.nbytes.mean() / plan.bucket_bytes)


def _sides(summary: PlanSummary) -> list[Table]:
    table = _table("Load", "", "least", "mean", "most", "busiest", "most / mean", "peers", "messages")
    for name, load in (("trainer rank sends", summary.sent), ("server rank receives", summary.received)):
        smallest, mean, largest = load.nbytes.min(), load.nbytes.mean(), load.nbytes.max()
        table.add_row(
            name,
            *(size(int(n)) for n in (smallest, mean, largest)),
            "all alike" if smallest == largest else f"rank {load.nbytes.argmax()}",
            f"{load.imbalance:.2f}",
            _range(load.peers),
            _range(load.messages),
        )
    tables = [table]
    for name, load in (("Trainer ranks, sending", summary.sent), ("Server ranks, receiving", summary.received)):
        if len(load.nbytes) <= LISTED_RANKS:
            each = _table(name, "rank", "bytes", "of the mean", "peers", "messages")
            mean = max(load.nbytes.mean(), 1)
            for rank, nbytes in enumerate(load.nbytes):
                figures = (size(int(nbytes)), f"{nbytes / mean:.2f}", str(load.peers[rank]), str(load.messages[rank]))
                each.add_row(str(rank), *figures)
            tables.append(each)
    return tables


def _range(values: Ints) -> str:
    return f"{values.min():,}" if values.min() == values.max() else f"{values.min():,} to {values.max():,}"


def _comparison(summary: PlanSummary, bandwidth: float) -> Table:
    table = _table(
        "Against whole tensors broadcast to all", "", "a server rank receives", "of the least", "time, at least"
    )
    received = int(summary.received.nbytes.max())
    table.add_row("this plan", size(received), f"{summary.ratio:.2f} x", duration(summary.seconds(bandwidth)))
    full = summary.full_bytes
    over = (full / summary.needed).max()
    table.add_row("full gather and broadcast", size(full), f"{over:.2f} x", duration(full / bandwidth))
    return table


def size(nbytes: int) -> str:
    """Formats bytes, such as `1.5 GB`. Decimal units, like bandwidths."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Formats seconds, such as `2.4 s` or `13 ms`."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
