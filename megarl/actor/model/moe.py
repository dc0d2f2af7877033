"""Mixtures of experts: Megatron's config fields, and a rank's experts as one module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import ExpertsBuilder
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.families.blocks import Decoder, Experts
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig


def overlaps_shared_experts(layout: ParallelConfig) -> bool:
    """True if shared experts may run during the exchange of tokens between ranks.

    `tp_comm_overlap` rules it out: Megatron takes the collectives from the layers of shared experts, and leaves them
    in the buffers of that overlap for gradients (shared_experts.py:157).

    Experts need buffers of their own, as they have where they lie on other ranks than dense weights. In common ones
    the stream of shared experts would wait for gathered weights that the experts read too, which would not.
    """
    wanted = platform.takes_gpu_options() if layout.overlap is None else layout.overlap
    own_buffers = layout.ep_size > 1 or layout.expert_tp_size not in (1, layout.tp_size)
    return wanted and own_buffers and not layout.tp_comm_overlap


def fits_fused_routing(experts: Experts) -> bool:
    """True if Transformer Engine's routing kernel takes this number of experts.

    A block of its backward pass holds four tokens in 48 KiB of shared memory. Each token takes three float32 numbers
    and a byte per expert (release 2.12, `fused_topk_with_score_function.cu`). Later releases ask for more memory.
    """
    return 4 * experts.count * (3 * 4 + 1) <= 48 * 1024


def moe_fields(
    model: Decoder,
    *,
    dispatcher: str,
    grouped: bool,
    fused_permutation: bool,
    fused_routing: bool,
    overlapped: bool,
) -> dict[str, Any]:
    """Builds the fields of Megatron's `TransformerConfig` for the model's experts.

    A token's weights are the softmax over all experts, cut to the largest `topk`. Megatron calls this pre-softmax. In
    models with normalised weights these `topk` sum to 1, which equals the softmax over them alone. Sigmoid scores are
    always normalised. Routing drops no token and adds no load-balancing loss, so it does not depend on the other tokens
    of a microbatch. A bias of the choice of experts stays as it was loaded.

    Args:
        dispatcher: `actor.moe_dispatcher`. Both take microbatches of different lengths, as `allgather` does not.
        grouped: computes a rank's experts in one module.
        fused_permutation: sorts tokens by expert in kernels of Transformer Engine.
        fused_routing: scores experts and chooses a token's in one kernel of Transformer Engine.
        overlapped: runs shared experts on a stream of their own, beside the exchange of tokens.
    """
    experts = model.experts
    if experts is None:
        return {"moe_token_dispatcher_type": dispatcher}  # Megatron's default is refused in dense models too
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(sparse) for sparse in model.sparse],
        "moe_ffn_hidden_size": experts.width,
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_shared_expert_overlap": overlapped and experts.shared_width > 0,
        "moe_router_topk": experts.topk,
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalized,
        "moe_router_score_function": experts.score,
        "moe_router_enable_expert_bias": experts.selection_bias,
        "moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "moe_router_group_topk": experts.topk_groups if experts.groups > 1 else None,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": grouped,
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_permute_fusion": fused_permutation,
        "moe_router_fusion": fused_routing and fits_fused_routing(experts),
    }


class FusedRouter(TopKRouter):
    """Router that gives Transformer Engine's kernel finite logits alone.

    Among scores that are NaN, the kernel chooses one expert again and again. The dispatcher then has too few tokens,
    and the run would end instead of skipping the step. The layer's input stays NaN, and so does the loss.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Computes logits, float32 `[sequence, batch, experts]`."""
        logits: Tensor = super().gating(input)
        if self.config.moe_router_fusion:
            logits.data.nan_to_num_()  # in place: autograd refuses this for the view that the product returns
        return logits


class FrozenBiasRouter(FusedRouter):
    """Router whose bias of the choice of experts stays as it was loaded.

    Its update balances experts in pretraining. A step of RL or of fine-tuning has too few tokens for that, and servers
    would route by another bias until the next sync.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        setattr(self, "frozen_expert_bias", True)  # noqa: B010 (only Megatron's finalize_model_grads reads it)


class GroupedLinear(torch.nn.Module):
    """Linear layers of a rank's experts on consecutive rows, in a loop over matrix products.

    Stands in for Transformer Engine's layer of this name where that cannot run. Both have parameters `weight0`,
    `weight1`, ... `[rows, columns]` and `bias0`, ... `[rows]`, with the marks that Megatron's gradient norm reads.
    Dispatchers exchange tokens.
    """

    def __init__(
        self,
        mode: str,
        experts: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        bias: bool,
        **_: Any,
    ) -> None:
        """Creates the parameters of `experts` layers, without values; `mode` is column or row, what etp cuts."""
        super().__init__()
        self.biased, self.experts = bias, experts
        self.adds_bias = bias and mode == "column"  # Megatron adds a bias of mode row itself
        cut = 0 if mode == "column" else 1
        shape = [output_size, input_size]
        shape[cut] //= pg_collection.expt_tp.size()
        # Megatron sums gradients over an expert's own replicas where `allreduce` is False.
        spread = config.expert_model_parallel_size > 1
        spread = spread or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for index in range(experts):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=cut, stride=1)
            weight.allreduce = not spread  # type: ignore[attr-defined]
            self.register_parameter(f"weight{index}", weight)
            if bias:
                self._add_bias(index, shape[0], config, device)
                getattr(self, f"bias{index}").allreduce = not spread

    def _add_bias(self, index: int, size: int, config: TransformerConfig, device: Any) -> None:
        bias = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
        if self.adds_bias:
            set_tensor_model_parallel_attributes(bias, is_parallel=True, dim=0, stride=1)
        self.register_parameter(f"bias{index}", bias)

    def forward(self, x: Tensor, rows: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Multiplies each expert's `rows` of `[sum of rows, input]`, in order. Returns `[sum of rows, output]`.

        Returns with it the biases that the caller adds, or None.
        """
        weights = [getattr(self, f"weight{index}") for index in range(self.experts)]
        biases = [getattr(self, f"bias{index}") for index in range(self.experts)] if self.biased else []
        added = biases if self.adds_bias else [None] * self.experts
        out = torch.cat([F.linear(*terms) for terms in zip(x.split(rows), weights, added, strict=True)])
        return out, biases if self.biased and not self.adds_bias else None


def clear_expert_marks(module: torch.nn.Module) -> None:
    """Takes Megatron's mark of sequence parallelism from biases of experts.

    By it, gradients are summed over tp, whose ranks hold different experts (layers.py:1413).
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name and getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def grouped_experts(activation: Any) -> ExpertsBuilder:
    """Builds experts in one module: products in a loop, the activation once for all tokens."""
    parts = GroupedMLPSubmodules(
        linear_fc1=partial(GroupedLinear, "column"),
        linear_fc2=partial(GroupedLinear, "row"),
        activation_func=activation,
    )
    return partial(TEGroupedMLP, submodules=parts)
