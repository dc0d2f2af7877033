"""Builds Megatron's distributed optimizer and learning-rate schedule from the optimizer knobs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.actor.api import FinetuneSpec
from megarl.actor.config import EngineConfig, OptimizerConfig
from megarl.actor.model.mtp import NORM_GROUP
from megarl.knobs import UserError


def build_optimizer(config: EngineConfig, ddps: list[Any], dtype: torch.dtype) -> Any:
    """Builds Adam over the DDP-wrapped modules, sharded over dp x cp.

    Main parameters and moments are float32. With `dtype` float32, the parameters are their own main parameters. Norms
    and biases are one-dimensional, and Megatron does not decay them (`get_standard_config_overrides`).
    """
    adam = config.optimizer
    megatron = MegatronOptimizerConfig(
        lr=adam.lr,
        min_lr=adam.lr * adam.min_lr_ratio,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.adam_beta1,
        adam_beta2=adam.adam_beta2,
        adam_eps=adam.adam_eps,
        clip_grad=adam.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=ddps[0].ddp_config.overlap_param_gather,
        optimizer_cpu_offload=config.offload_optimizer,
        optimizer_offload_fraction=1.0 if config.offload_optimizer else 0.0,
        overlap_cpu_optimizer_d2h_h2d=config.offload_optimizer,
    )
    optimizer = get_megatron_optimizer(megatron, ddps)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.is_stub_optimizer:
            _correct_order(part)
    return optimizer


def _correct_order(optimizer: Any) -> None:
    """Corrects Megatron's index of main parameters, in groups with float32 and bfloat16 parameters.

    It counts parameters in the order of gradient buffers (distrib_optimizer.py:337), but a group has those in float32
    first (distrib_optimizer.py:487). A checkpoint by that index would mix up parameters and their moments.
    """
    for group, ranges in enumerate(optimizer.opt_group_ranges):
        ordered = sorted(ranges["params"], key=lambda param: param.dtype != torch.float32)  # stable
        optimizer.model_param_group_index_map.update({param: (group, place) for place, param in enumerate(ordered)})


def mtp_grad_norm(optimizer: Any) -> float:
    """Computes the gradient norm of layers of multi-token prediction, beside the model's. A collective."""
    return float(optimizer._get_grad_norm_for_group(NORM_GROUP))


def step_by_norm(optimizer: Any, norm: float, mtp_norm: float = 0.0) -> None:
    """Clips prepared gradients (`prepare_grads`) by their norms and takes a step.

    This is the second half of Megatron's `ChainedOptimizer.step` (optimizer/optimizer.py:1855). Its first half would
    prepare the gradients and compute their norms again.
    """
    for part in optimizer.chained_optimizers:
        if part.config.clip_grad <= 0 or part.is_stub_optimizer:
            continue
        parameters = part.get_parameters()
        for is_mtp, total in ((False, norm), (True, mtp_norm)):
            if clipped := [p for p in parameters if (getattr(p, "grad_norm_group", "") == NORM_GROUP) == is_mtp]:
                clip_grad_by_total_norm_fp32(clipped, part.config.clip_grad, total)
    optimizer.step_with_ready_grads()


def build_scheduler(adam: OptimizerConfig, optimizer: Any, ft_spec: FinetuneSpec | None) -> OptimizerParamScheduler:
    """Builds Megatron's learning-rate schedule over the run's steps. The first step has a rate above 0.

    Raises:
        UserError: `ft_spec` is missing for a style that needs the number of steps, or a decay is longer than the run.
    """
    if ft_spec is None and adam.lr_decay_style != "constant":
        raise UserError(
            f"actor.optimizer.lr_decay_style={adam.lr_decay_style} needs the number of steps: give initialize a "
            "FinetuneSpec, or use constant"
        )
    total = ft_spec.total_train_steps if ft_spec else 1
    adam.check_length(total)
    offset = 1 if adam.warmup_steps else 0  # the first step of a warm-up has a rate above 0
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=adam.lr,
        min_lr=adam.lr * adam.min_lr_ratio,
        lr_warmup_steps=adam.warmup_steps,
        lr_decay_steps=max(total, adam.warmup_steps + 1) + offset,
        lr_decay_style=adam.lr_decay_style,
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=adam.wsd_decay_steps,
        lr_wsd_decay_style=adam.lr_wsd_decay_style,
    )
    scheduler.step(offset)
    return scheduler
