"""Attention kernels that Transformer Engine has for packed sequences, by GPU. Imports no Megatron.

Transformer Engine 2.12.0 takes cuDNN's or flash-attn's. Where neither serves, its unfused attention stores the scores
of all sequences, padded to the longest, which plans of memory do not count. It takes no sequences cut over ranks.

    rule                                                   source (common/fused_attn, dot_product_attention)
    cuDNN: packed sequences from 9.0 on, not on 12.0       fused_attn.cpp:395, utils.py:693
    cuDNN: trained heads of at most 128, on 9.0 of 256     fused_attn.cpp:306
    flash-attn: from 8.0 on                                utils.py:428
    flash-attn: heads of at most 192, on some of 256       utils.py:627
    flash-attn: no sinks                                   utils.py:715
    unfused: no sequences cut over ranks                   utils.py:755
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PretrainedConfig

from megarl.families import decoder
from megarl.families.blocks import Attention, LatentAttention
from megarl.knobs import UserError
from megarl.parallel.config import ParallelConfig

UNFUSED_TOKENS = 2048  # sequences of so few tokens may store their scores
VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")

_CUDNN_PACKED = (9, 0)  # lowest compute capability on which cuDNN's attention takes packed sequences
_CUDNN_UNPACKED = (12, 0)
_CUDNN_HEADS, _CUDNN_HEADS_OF_HOPPER = 128, 256
_FLASH_CAPABILITY = (8, 0)
_FLASH_HEADS, _FLASH_WIDE_HEADS = 192, 256
_FLASH_WIDE = ((8, 0), (9, 0), (10, 0), (12, 0))  # with larger heads
_NOT_INSTALLED = "is not installed"


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuses variables that choose a kernel: Megatron takes 1 alone, on any backend (language_module.py:118).

    Raises:
        UserError: naming the variable.
    """
    for name in VARIABLES:
        if (value := environment.get(name, "1")) != "1":
            raise UserError(
                f"{name}={value} forbids or forces an attention kernel, and Megatron-core takes 1 alone: Transformer "
                f"Engine chooses; unset {name}"
            )


def check_kernels(
    parallel: ParallelConfig,
    model: PretrainedConfig,
    on_te: bool,
    capability: tuple[int, int] | None,
    has_flash_attention: bool,
    longest: int | None = None,
    trains: bool = True,
) -> None:
    """Refuses a model whose packed sequences no kernel takes, or only one that would store long sequences' scores.

    Args:
        on_te: the engine has Transformer Engine's layers.
        capability: the lowest of this machine's GPUs; None without one.
        has_flash_attention: the package flash_attn is installed.
        longest: tokens of the longest sequence; None where it is not known, and scores may be stored.
        trains: the engine computes gradients.

    Raises:
        UserError: naming the layout or the length, the GPU and what each kernel lacks.
    """
    is_cut, is_long = parallel.cp_size > 1, longest is not None and longest > UNFUSED_TOKENS
    if not on_te or capability is None or not (is_cut or is_long):
        return
    for block in decoder(model).attentions:
        cudnn, flash = cudnn_lacks(block, capability, trains), flash_lacks(block, capability, has_flash_attention)
        if not cudnn or not flash:
            continue
        what = f"parallel.cp_size={parallel.cp_size} needs" if is_cut else f"sequences of up to {longest} tokens need"
        remedies = ["install it"] if flash == _NOT_INSTALLED else []
        remedies.append("set actor.backend=torch")
        if not is_cut:
            remedies.append(f"shorten them to {UNFUSED_TOKENS} (train_dataset.max_length, gconfig.max_new_tokens)")
        raise UserError(
            f"{what} cuDNN's attention or flash-attn on Transformer Engine's layers for a {model.model_type} model's "
            f"heads of {block.head_dim}{' with sinks' if block.sinks else ''}, and on this GPU of compute capability "
            f"{'.'.join(map(str, capability))} cuDNN's {cudnn} and flash-attn {flash}"
            f"{'' if is_cut else ', so all their scores would be stored'}; {', or '.join(remedies)}"
        )


def cudnn_lacks(block: Attention | LatentAttention, capability: tuple[int, int], trains: bool) -> str:
    """Says why cuDNN's attention does not take a layer's packed sequences; empty if it may."""
    if capability < _CUDNN_PACKED:
        return f"takes packed sequences from {'.'.join(map(str, _CUDNN_PACKED))} on"
    if capability == _CUDNN_UNPACKED:
        return "takes no packed sequences"
    most = _CUDNN_HEADS_OF_HOPPER if capability == (9, 0) else _CUDNN_HEADS
    return f"trains heads of at most {most}" if trains and block.head_dim > most else ""


def flash_lacks(block: Attention | LatentAttention, capability: tuple[int, int], is_installed: bool) -> str:
    """Says why flash-attn does not take a layer; empty if it may."""
    most = _FLASH_WIDE_HEADS if capability in _FLASH_WIDE else _FLASH_HEADS
    if capability < _FLASH_CAPABILITY:
        return f"needs {'.'.join(map(str, _FLASH_CAPABILITY))}"
    if block.sinks:
        return "has no sinks"
    if block.head_dim > most:
        return f"takes heads of at most {most}"
    return "" if is_installed else _NOT_INSTALLED
