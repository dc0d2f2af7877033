"""Megatron's data parallelism around the stages of a model: gradient reduction and gathering of updated parameters.

With `parallel.overlap`, both hide behind compute. A bucket's gradients are reduced once backward has added the last of
them, and a bucket's parameters are gathered while the layers before it run forward. So parameters outside this rank's
shard are old between an optimizer step and the end of the next forward pass. `complete_parameters` gathers them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.models.gpt.gpt_model import GPTModel

from megarl.actor.model import heads
from megarl.parallel import platform
from megarl.parallel.config import ParallelConfig
from megarl.parallel.groups import Groups


def overlaps(parallel: ParallelConfig) -> bool:
    """True if communication of data parallel groups overlaps with compute."""
    return platform.takes_gpu_options() if parallel.overlap is None else parallel.overlap


def wrap(modules: Sequence[GPTModel], groups: Groups) -> list[DistributedDataParallel]:
    """Wraps this rank's virtual stages, and layers of multi-token prediction behind them.

    Gradients are float32 and sharded over dp x cp, as the optimizer is.
    """
    overlap = overlaps(groups.layout)
    ddps = [
        DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
            ),
            module,
            disable_bucketing=stage > 0,  # only the first virtual stage's buckets become ready one by one
            pg_collection=groups.collection,
        )
        for stage, module in enumerate(modules)
    ]
    for module in modules:
        module.config.finalize_model_grads_func = functools.partial(_finalize, ddps[groups.vpp_size :], groups)
        if overlap:  # the schedules reduce in the last microbatch's backward pass only
            module.config.no_sync_func = functools.partial(_no_sync, ddps)
    for group in _bucket_groups(ddps):
        group.param_gather_dispatched = True  # every rank loads complete parameters
    last = groups.vpp_size - 1
    if overlap and modules[last].post_process:
        _ready_by_hand(ddps[last], modules[last])
    if overlap:
        for module in modules:
            _await_gates(ddps, module)
    return ddps


def release(ddps: Sequence[Any]) -> None:
    """Lets go of the models in `ddps`, which are of no further use.

    Hooks hold a DDP from autograd's graph, where garbage collection does not look. A dispatcher of experts keeps the
    graph of its last probabilities. So a mixture of experts that was trained would never be freed.
    """
    for ddp in ddps:
        vars(ddp).clear()


def _finalize(beside: Sequence[Any], groups: Groups, stages: Sequence[Any], _: Any, **options: Any) -> None:
    """Completes gradients after backward: of the model's stages, and of modules `beside` the schedule's."""
    finalize_model_grads(stages, None, **options)
    for ddp in beside:
        ddp.finish_grad_sync()
        _allreduce_non_tensor_model_parallel_grads([ddp], ddp.config, groups.tp)


def _no_sync(ddps: Sequence[Any]) -> contextlib.ExitStack:
    """Context in which no gradients are reduced."""
    stack = contextlib.ExitStack()
    for ddp in ddps:
        stack.enter_context(ddp.no_sync())
    return stack


def _ready_by_hand(ddp: DistributedDataParallel, module: GPTModel) -> None:
    """Gives the LM head's weight `grad_ready`, unless it is frozen or the embedding's lookup here runs its hook."""
    weight: Any = heads.weight_of(module)
    if weight.requires_grad and not (module.share_embeddings_and_output_weights and module.pre_process):
        weight.grad_ready = functools.partial(ddp.param_to_bucket_group[weight].register_grad_ready, weight)


def _await_gates(ddps: Sequence[Any], module: GPTModel) -> None:
    """Makes routers wait for the gate of shared experts that run while tokens are exchanged.

    Megatron multiplies by that gate before it runs any module of the shared experts, and no hook would wait for it.
    """
    for layer in module.modules():
        gate = getattr(getattr(layer, "shared_experts", None), "gate_weight", None)
        if gate is not None and layer.shared_expert_overlap:
            layer.router.register_forward_pre_hook(lambda *_, gate=gate: await_parameter(ddps, gate))


def await_parameter(ddps: Sequence[Any], parameter: torch.Tensor) -> None:
    """Waits until a parameter is gathered. For one that is read outside its module, whose hook would wait."""
    for ddp in ddps:
        group = ddp.param_to_bucket_group.get(parameter) if _gathers_late(ddp) else None
        if group is not None:
            group.finish_param_sync()


def complete_parameters(ddps: Sequence[Any]) -> None:
    """Gathers the parameters that no forward pass has gathered since the last step. A collective of dp x cp."""
    pending = [group for group in _bucket_groups(ddps) if _gathers_late(group) and not _is_gathered(group)]
    for group in pending:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in pending:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def _bucket_groups(ddps: Sequence[Any]) -> Iterator[Any]:
    for ddp in ddps:
        if isinstance(ddp, DistributedDataParallel):
            yield from (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)


def _gathers_late(part: Any) -> bool:
    """True for a DDP module or one of its bucket groups with `overlap_param_gather`."""
    config = getattr(part, "ddp_config", None)  # stages of a frozen engine have none
    return config is not None and bool(config.overlap_param_gather)


def _is_gathered(group: Any) -> bool:
    return bool(group.param_gather_dispatched) and group.param_gather_handle is None
