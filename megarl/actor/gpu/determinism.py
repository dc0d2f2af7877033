"""Checks that training on GPUs can be repeated bit for bit. Imports no Megatron."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from megarl.actor.config import EngineConfig, backend_of
from megarl.families import decoder
from megarl.knobs import UserError
from megarl.parallel import determinism
from megarl.parallel.determinism import Determinism

CUDNN_CAPABILITY = (9, 0)  # lowest on which cuDNN's attention has a deterministic backward (Transformer Engine 2.12)


def check_knobs(config: EngineConfig, deterministic: Determinism) -> None:
    """Refuses DeepEP: it would sum an expert's gradients in the order in which tokens happen to arrive.

    Raises:
        UserError: naming the knob.
    """
    if deterministic.by_library and config.moe_dispatcher == "flex":
        raise UserError(
            "actor.moe_dispatcher=flex receives tokens in the order of their arrival, and deterministic=true "
            "adds in one order; set it to alltoall"
        )


def check_model(model: PretrainedConfig, deterministic: Determinism) -> None:
    """Refuses models with layers that lack deterministic kernels.

    Raises:
        UserError: naming the layers.
    """
    if not deterministic.by_library:
        return
    shape = decoder(model)
    for layers, is_there, reason in (
        ("gated delta nets", shape.delta_net is not None, "Megatron has none for packed sequences"),
        ("attention sinks", any(block.sinks for block in shape.attentions), "Transformer Engine has none"),
    ):
        if is_there:
            raise UserError(
                f"deterministic=true needs deterministic kernels, and of {layers}, as this {model.model_type} model "
                f"has, {reason}; set it to false"
            )


def check_gpu(
    config: EngineConfig,
    deterministic: Determinism,
    has_gpu: bool,
    has_te: bool,
    capability: tuple[int, int] | None,
    has_flash_attention: bool,
    environment: Mapping[str, str],
) -> None:
    """Refuses machines without GPUs or deterministic attention, and environment variables that undo the mode.

    Args:
        capability: the lowest of this machine's GPUs; None without one.
        has_flash_attention: the package flash_attn is installed.
        environment: the process's variables.

    Raises:
        UserError: naming what is missing.
    """
    if not deterministic.by_library:
        return
    if not has_gpu:
        raise UserError(
            "deterministic=true is planned for GPUs (cluster.gpus_per_node), and this machine has none; set "
            "cluster.gpus_per_node=0 for a run on CPU"
        )
    determinism.check_variables(environment)
    on_te = backend_of(config, has_gpu=has_gpu, has_te=has_te) == "te"
    if on_te and capability is not None and capability < CUDNN_CAPABILITY and not has_flash_attention:
        raise UserError(
            f"deterministic=true on Transformer Engine's layers needs a GPU of compute capability "
            f"{'.'.join(map(str, CUDNN_CAPABILITY))}, or the package flash_attn, and this one has "
            f"{'.'.join(map(str, capability))}; install it, or set actor.backend=torch"
        )
