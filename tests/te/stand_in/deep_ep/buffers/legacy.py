"""The buffer of DeepEP's first interface, through which Megatron sends tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.utils.event import EventHandle, EventOverlap

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


class Config:
    """Sizes of a transfer's buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Sends each token once to every rank with an expert of it, and sums what comes back."""

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool | None = None,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert not low_latency_mode
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        ranks = self.group.size()
        owner = topk_idx // (num_experts // ranks)
        in_rank = torch.stack([(owner == rank).any(dim=1) for rank in range(ranks)], dim=1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return in_rank.sum(dim=0).int(), None, per_expert, in_rank, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Rows come ordered by their rank, then by token; `recv_topk_idx` counts local experts, with -1 for others'."""
        assert x.is_contiguous()
        event = EventOverlap(EventHandle())
        if handle is not None:
            rows, sent, received, _ = handle
            return self._exchange(x[rows], sent, received), None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        rows = torch.cat([part.nonzero().flatten() for part in is_token_in_rank.unbind(dim=1)])
        sent = num_tokens_per_rank.tolist()
        counts = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(counts, num_tokens_per_rank, group=self.group)
        received = counts.tolist()
        index = self._exchange(topk_idx[rows], sent, received)
        weights = self._exchange(topk_weights[rows], sent, received)
        experts = len(num_tokens_per_expert) // self.group.size()
        index = index - self.group.rank() * experts
        index[(index < 0) | (index >= experts)] = -1
        weights = weights.masked_fill(index < 0, 0.0)
        per_expert = [int((index == expert).sum()) for expert in range(experts)]
        handle = (rows, sent, received, x.shape[0])
        return self._exchange(x[rows], sent, received), index, weights, per_expert, handle, event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert bias is None
        rows, sent, received, tokens = handle

        def summed(part: Tensor) -> Tensor:
            back = self._exchange(part, received, sent)
            return back.new_zeros(tokens, back.shape[1]).index_add_(0, rows, back)

        weights = None if topk_weights is None else summed(topk_weights)
        return summed(x), weights, EventOverlap(EventHandle())

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out
