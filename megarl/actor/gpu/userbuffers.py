"""Overlaps tensor parallel collectives, cut in pieces, with the products they feed (`parallel.tp_comm_overlap`).

Transformer Engine moves the pieces through buffers of one fixed shape, its "userbuffers". So every microbatch is padded
to the same number of tokens, `actor.max_tokens_per_mb`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megarl.actor.config import EngineConfig
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig

if TYPE_CHECKING:  # imports Megatron, which preflight does without
    from megarl.parallel.groups import Groups

_MXFP8_TOKENS = 128  # divides a rank's tokens, `fill_userbuffers_buffer_for_all_gather` of Transformer Engine 2.12

_shape: tuple[int, int, str] | None = None  # tokens, hidden size and fp8 of this process's buffers


def check_knobs(config: EngineConfig, parallel: ParallelConfig, deterministic: bool) -> None:
    """Refuses the option where Transformer Engine's layers do not run, or do not take it.

    Raises:
        UserError: naming the knob.
    """
    if not parallel.tp_comm_overlap:
        return
    if config.backend not in ("auto", "te") or config.shared_prefix or deterministic or config.dtype == "float32":
        raise UserError(
            "parallel.tp_comm_overlap=true works in Transformer Engine's layers: set it to false, or actor.backend="
            f"{config.backend} to te, actor.dtype={config.dtype} to bfloat16, and shared_prefix and deterministic to "
            "false"
        )
    if config.fp8 == "blockwise":
        raise UserError(
            "parallel.tp_comm_overlap=true moves bfloat16 or mxfp8, and actor.fp8=blockwise; set one of them to "
            "false or off"
        )


def check_device(
    parallel: ParallelConfig, has_te: bool, capability: tuple[int, int] | None, environment: Mapping[str, str]
) -> None:
    """Refuses the option on a machine without Transformer Engine, or on GPUs before multicast (of 9.0).

    Raises:
        UserError: naming the knob.
    """
    if parallel.tp_comm_overlap and not has_te:
        raise UserError(
            "parallel.tp_comm_overlap=true needs the package transformer_engine and a GPU, and one was not found; "
            "set it to false"
        )
    if parallel.tp_comm_overlap and capability and capability < (9, 0) and environment.get("UB_SKIPMC") != "1":
        raise UserError(
            "parallel.tp_comm_overlap=true needs CUDA multicast, and this machine's GPUs have compute capability "
            f"{capability[0]}.{capability[1]}; set the variable UB_SKIPMC=1, or the option to false"
        )


def token_multiple(config: EngineConfig, parallel: ParallelConfig) -> int:
    """Multiple of a rank's tokens that the buffers add to the layers' own."""
    return _MXFP8_TOKENS if parallel.tp_comm_overlap and config.fp8 == "mxfp8" else 1


def initialize(tokens: int, hidden_size: int, groups: Groups, fp8: str) -> None:
    """Makes the buffers of this process, as Megatron's `_initialize_tp_communicators` does. A collective.

    Args:
        tokens: of every microbatch.

    Raises:
        UserError: another model of the process has buffers of another shape.
    """
    from transformer_engine.pytorch.module import base

    global _shape
    shape = (tokens, hidden_size, fp8)
    if _shape is not None:
        if _shape != shape:
            raise UserError(
                f"parallel.tp_comm_overlap=true has one buffer for all models of a process: {_shape[0]} tokens x "
                f"hidden size {_shape[1]} (fp8={_shape[2]}), and this one needs {tokens} x {hidden_size} "
                f"(fp8={fp8}); set it to false"
            )
        return
    mode = base.UserBufferQuantizationMode.NONE if fp8 == "off" else base.UserBufferQuantizationMode.FP8
    base.initialize_ub(
        shape=[tokens, hidden_size],
        tp_size=groups.tp_size,
        quantization_modes=[mode],
        ub_cfgs={},
        bootstrap_backend="nccl",
    )
    _shape = shape


def destroy() -> None:
    """Frees this process's buffers, if it has any."""
    global _shape
    if _shape is not None:
        from transformer_engine.pytorch.module import base

        base.destroy_ub()
        _shape = None
