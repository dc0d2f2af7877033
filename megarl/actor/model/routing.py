"""Replays given experts in the routers of a model (`algorithm.routing_replay`).

A `ReplayedRouter` fills Megatron's hook for it, `TopKRouter.router_replay`. Megatron's own class keeps all routers of a
process in one list, and must be told which pass runs. Here each engine has its own routers, and a pass is known by its
microbatch: only a recomputation in backward has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.actor.batch.microbatch import Microbatch
from megarl.actor.model.backends import LayerBackend
from megarl.device_copies import to_device
from megarl.families.blocks import Decoder
from megarl.knobs import UserError
from megarl.parallel import platform
from megarl.parallel.groups import Groups
from megarl.types import ROUTED_EXPERTS, PackedBatch

TopK = Callable[..., tuple[Tensor, Tensor]]


def replaying(backend: LayerBackend) -> LayerBackend:
    """Returns the backend with routers that can be asked for a replayed choice.

    Megatron's fused routing takes none and does not ask for it (`topk_routing_with_score_function`).
    """
    return dataclasses.replace(backend, fused_routing=False)


class ReplayedRouter:
    """A router's choice of experts: the one that is replayed, or its own where there is none."""

    def __init__(self) -> None:
        self.layer_number: int | None = None  # set by Megatron
        self.replayed: Tensor | None = None  # of the microbatch in its forward pass, int64 [rows, topk]; -1: none
        self.chosen: Tensor | None = None  # in the last forward pass, int64 [rows, topk]
        self.waiting: deque[Tensor] = deque()  # choices of microbatches that backward may recompute, in their order
        self.keeps = False  # True if backward recomputes, so that `waiting` is read
        self.counts: list[Tensor] = []  # of each microbatch, [2]: rows whose own choice was another, and rows replayed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns scores and ids of the experts of each row, `[rows, topk]`. Called by Megatron.

        A recomputation takes the choice of its microbatch's forward pass: pipelines run the backward passes of a stage
        in the order of its forward passes.
        """
        if self.replayed is None and self.waiting:
            experts = self.waiting.popleft()
            return scores.gather(1, experts), experts
        assert default_compute_topk is not None, "Megatron gives it"
        chosen_scores, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.replayed is None:
            self.chosen = chosen
            return chosen_scores, chosen
        if self.replayed.shape != chosen.shape:
            raise ValueError(f"routes of shape {tuple(self.replayed.shape)} for experts {tuple(chosen.shape)}")
        given = self.replayed[:, :1] >= 0
        experts = torch.where(given, self.replayed, chosen)
        with torch.no_grad():
            differs = (experts.sort(-1).values != chosen.sort(-1).values).any(-1)  # False without a given route
            self.counts.append(torch.stack((differs.sum(), given.sum())))
        self.chosen = experts
        if self.keeps:
            self.waiting.append(experts)
        return scores.gather(1, experts), experts


class RoutingReplay:
    """Routers of a rank's stages, which replay the routes of the microbatch in its forward pass."""

    def __init__(self, stages: Sequence[Any], model: Decoder, groups: Groups, recomputes: bool) -> None:
        """Takes over the routers of `stages`; with `recomputes`, backward runs them again (`actor.recompute`).

        Raises:
            UserError: the model is dense.
        """
        if model.experts is None:
            raise UserError("algorithm.routing_replay replays a choice of experts, and this model is dense; set it off")
        self.experts, self.groups, self.recomputes = model.experts, groups, recomputes
        self.splits = groups.tp_size if groups.layout.sequence_parallel else 1  # tp ranks with a part of the rows each
        order = [number for number, sparse in enumerate(model.sparse, start=1) if sparse]
        self.layers = len(order)
        self.routers: dict[int, ReplayedRouter] = {}  # by index among the layers with experts
        for stage in stages:
            for router in (module for module in stage.modules() if isinstance(module, TopKRouter)):
                assert not router.config.moe_router_fusion, "fused routing would not ask: build it by `replaying`"
                self.routers[order.index(router.layer_number)] = router.router_replay = ReplayedRouter()
        self.trains = False  # True in a pass with backward
        self.recorded: list[tuple[Microbatch, dict[int, Tensor]]] | None = None  # choices of a pass, if it is recorded

    def check(self, batch: PackedBatch) -> None:
        """Refuses a batch whose trained tokens were sampled by routes that it does not hold.

        Only tokens behind a sequence's last trained one may lack a route: no log-prob depends on them.

        Raises:
            UserError: naming the sequence and its first token without a route.
        """
        if ROUTED_EXPERTS not in batch:
            raise UserError(
                "algorithm.routing_replay needs the batch's routed_experts [tokens, layers with experts, topk], and it "
                "has none: the workflow lost them; take one of megarl's, or set routing_replay=off"
            )
        routes, bounds, topk = batch[ROUTED_EXPERTS], batch.cu_seqlens.long(), self.experts.topk
        if routes.shape[1:] != (self.layers, topk):
            raise UserError(
                f"routed_experts are of shape {list(routes.shape)}, and the model routes in {self.layers} layers to "
                f"{topk} experts; give those of the same model"
            )
        owner = torch.repeat_interleave(torch.arange(batch.num_seqs), batch.lengths)
        trained = batch["loss_mask"].bool() if "loss_mask" in batch else torch.ones(batch.total_tokens).bool()
        position = torch.arange(batch.total_tokens)
        last = torch.full((batch.num_seqs,), -1).scatter_reduce(0, owner, torch.where(trained, position, -1), "amax")
        missing = (position < last[owner]) & ((routes < 0) | (routes >= self.experts.count)).flatten(1).any(1)
        if bool(missing.any()):
            token = int(missing.nonzero()[0])
            sequence = int(owner[token])
            raise UserError(
                f"sequence {sequence} of the batch has no route for token {token - int(bounds[sequence])} of "
                f"{int(batch.lengths[sequence])}, and {len(owner[missing].unique())} of {batch.num_seqs} sequences "
                "lack some; replay never mixes both choices: find what lost them, or set algorithm.routing_replay=off"
            )

    def begin(self, trains: bool) -> Callable[[Microbatch], contextlib.AbstractContextManager[None]]:
        """Begins a pass over microbatches. Returns the context of one's forward pass."""
        self.trains = trains
        for router in self.routers.values():
            router.waiting.clear()
        return self._passing

    @contextlib.contextmanager
    def _passing(self, mb: Microbatch) -> Iterator[None]:
        for layer, router in self.routers.items():
            router.chosen = None
            if mb.routes is not None:
                part = mb.routes.chunk(self.splits)[self.groups.tp_rank if self.splits > 1 else 0]
                router.replayed, router.keeps = part[:, layer].long(), self.recomputes and self.trains
        try:
            yield
            if self.recorded is not None:
                chosen = {i: router.chosen for i, router in self.routers.items() if router.chosen is not None}
                self.recorded.append((mb, chosen))
        finally:
            for router in self.routers.values():
                router.replayed = None

    @contextlib.contextmanager
    def recording(self, batch: PackedBatch) -> Iterator[None]:
        """Context of a pass over `batch` in which routers choose; then sets the batch's `routed_experts`. A collective.

        Every rank gets the routes of all tokens and layers.
        """
        self.recorded = []
        try:
            yield
            routes = self._gathered(batch)
        finally:
            self.recorded = None
        batch.set_tokens(ROUTED_EXPERTS, routes)

    def _gathered(self, batch: PackedBatch) -> Tensor:
        """Gathers the recorded choices over tp, cp, dp and pp, int16 `[total_tokens, layers, topk]` on the host."""
        device = platform.device()
        recorded = [
            (mb, chosen, to_device(batch.token_index(mb.indices), device)) for mb, chosen in self.recorded or ()
        ]
        routes = torch.empty(batch.total_tokens, self.layers, self.experts.topk, dtype=torch.int16)
        for layer in range(self.layers):  # one at a time on the device: a batch's take gigabytes
            of_layer = torch.zeros(batch.total_tokens, self.experts.topk, dtype=torch.int32, device=device)
            for mb, chosen, index in recorded:
                if layer in chosen:
                    rows = self._gathered_rows(mb, chosen[layer].int())
                    if mb.indices:  # an empty microbatch runs another's sequence
                        of_layer[index] = rows
            for group in (self.groups.dp, self.groups.pp):  # each element is set on one of their ranks
                if group.size() > 1:
                    dist.all_reduce(of_layer, group=group)
            routes[:, layer] = of_layer.to(torch.int16).cpu()
        return routes

    def _gathered_rows(self, mb: Microbatch, rows: Tensor) -> Tensor:
        """Gathers a layer's choices for all tokens of a microbatch, over tp and cp."""
        if self.splits > 1:
            parts = [torch.empty_like(rows) for _ in range(self.splits)]
            dist.all_gather(parts, rows.contiguous(), group=self.groups.tp)
            rows = torch.cat(parts)
        return rows[mb.shared.rows] if mb.shared is not None else mb.gather(rows, self.groups.cp)

    def changed_share(self) -> float:
        """Share of replayed choices, by token and layer, that routers would have made otherwise. A collective.

        Counts the passes since the last call, without recomputations.
        """
        counts = torch.zeros(2, dtype=torch.float64, device=platform.device())
        for router in self.routers.values():
            counts += sum(router.counts, torch.zeros_like(counts))
            router.counts.clear()
        if dist.get_world_size() > 1:
            dist.all_reduce(counts)
        changed, replayed = counts.tolist()
        return changed / max(replayed, 1.0)
