"""Adam, and the kernels over lists of tensors by which Megatron clips gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_engine.signatures import taken


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay. Counts steps by group, as the real one does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        a = taken(
            "optimizers.FusedAdam.__init__",
            "params lr betas eps weight_decay bias_correction adam_w_mode",
            args,
            kwargs,
        )
        assert a.adam_w_mode
        assert a.bias_correction
        super().__init__(
            a.params,
            {"lr": a.lr, "bias_correction": True, "betas": a.betas, "eps": a.eps, "weight_decay": a.weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if p.grad is None:
                    continue
                assert p.dtype == p.grad.dtype == torch.float32
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(p.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denominator = (square / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                update = mean / (1 - beta1 ** group["step"]) / denominator + group["weight_decay"] * p
                p.sub_(lr * update)


class FusedSGD(torch.optim.Optimizer):
    """Never built by megarl; Megatron names the class."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the stand-in of Transformer Engine has no FusedSGD")


def multi_tensor_applier(op: Any, noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm over all tensors `[1]`, and an empty tensor in place of each one's."""
    assert not per_tensor
    (tensors,) = tensor_lists
    assert tensors, "the real kernel needs at least one tensor"
    return torch.stack([t.float().norm() for t in tensors]).norm().reshape(1), torch.empty(0)


def multi_tensor_scale(chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source * scale)
