"""Binds SGLang's layout rules to a live model: views of its parameters, and checks that the rules hold for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from megarl.families import FAMILIES
from megarl.families.weight_formats import ServedFormat, format_of
from megarl.reshard.plan.holdings import Fragment
from megarl.reshard.plan.sglang_blocks import ParameterPart, ServerParameter
from megarl.reshard.plan.sglang_layout import Geometry

REPACKED = {  # flags of a module or its quant_method: how SGLang has rearranged its weights after loading
    "use_intel_amx_backend": "packed for AMX",
    "w13_swiglu_interleaved": "interleaved; unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
    "load_up_proj_weight_first": "stacked up before gate; use --moe-runner-backend triton",
    "use_triton_kernels": "transposed; use --moe-runner-backend triton",
    "use_flashinfer_trtllm_moe": "in blocks; use --moe-runner-backend triton",
    "use_marlin": "packed for Marlin; FP8 needs GPUs of compute capability 8.9 or higher",
    "is_marlin_converted": "packed for Marlin; use --moe-runner-backend triton",
    "block_fp8_as_mxfp8": "copied to MXFP8; use --fp8-gemm-backend triton",
}
UNTOUCHED = (  # tensors of a quantised server that no trainer has
    ".k_scale", ".v_scale",  # of the KV cache: 1 unless a checkpoint has them
    "weight_shape",  # of 4-bit weights: no kernel reads it
    "weight_g_idx", "weight_zero_point", "g_idx_sort_indices",  # of other forms of 4-bit weights
)  # fmt: skip


class LayoutError(ValueError):
    """A live server's parameters differ from the rules. `tensor` names the parameter."""

    def __init__(self, message: str, tensor: str):
        super().__init__(message)
        self.tensor = tensor


def view_of(part: ParameterPart, parameter: Tensor) -> Tensor:
    """The view of a parameter that holds the part's box."""
    lead = len(part.at) - len(part.box.start)
    inner = parameter[part.at[:lead]]
    steps = (part.step, *[1] * len(part.box.shape))
    places = zip(part.at[lead:], part.box.shape, steps, strict=False)
    return inner[tuple(slice(a, a + n * step, step) for a, n, step in places)]


def live_fragments(parameters: Iterable[tuple[str, Tensor]], geometry: Geometry) -> Iterator[Fragment]:
    """Yields all fragments of one SGLang rank, as views of its live parameters, in their order.

    Raises:
        LayoutError: live names or shapes differ from the rules: to guess would corrupt weights in silence.
    """
    rules = {p.name: p for p in geometry.parameters()}
    rank = f"rank {geometry.rank.tp_rank} of {geometry.rank.tp_size}"
    for name, parameter in parameters:
        if name.startswith(FAMILIES[geometry.family].sglang_untouched):
            continue
        if geometry.format is not None:
            if name.endswith(UNTOUCHED):
                continue
            parameter = as_loaded(parameter)
        rule = rules.pop(name, None)
        shape = list(parameter.shape)
        if rule is None:
            raise LayoutError(
                f"SGLang holds {name} {shape} on {rank}, and no rule for {geometry.family} names it: "
                "live weight updates would leave it stale",
                name,
            )
        if tuple(shape) != rule.shape:
            raise LayoutError(
                f"SGLang holds {name} as {shape} on {rank}, and the rules for {geometry.family} say {list(rule.shape)}",
                name,
            )
        if geometry.format is not None:
            _check_dtype(name, parameter, rule, geometry.format)
        for part in rule.parts:
            yield Fragment(geometry.rank.tp_rank, name, part.box, view_of(part, parameter.detach()))
    for name, rule in rules.items():
        raise LayoutError(
            f"SGLang holds no {name} on {rank}, and the rules for {geometry.family} say {list(rule.shape)}", name
        )


def unsent_parameters(geometry: Geometry) -> set[str]:
    """Names of parameters that no weight is sent for."""
    return {rule.name for rule in geometry.parameters() if not rule.parts}


def complete(model: nn.Module, unsent: Collection[str]) -> None:
    """Brings up to date what a server rank keeps beside the weights that are sent.

    Latent attention has rearranged copies of `kv_b_proj`. `GemmaRMSNorm` has its weight with 1 added, which the fused
    all-reduce of GPUs reads. Parameters that are `unsent` are zero: memory that a co-located server gave up holds
    anything when it is back.
    """
    if (rearrange := getattr(model, "post_load_weights", None)) is not None:
        rearrange()
    for module in model.modules():
        if (refresh := getattr(module, "refresh_gemma_weight", None)) is not None:
            refresh()
    for name, parameter in model.named_parameters():
        if name in unsent:
            parameter.detach().zero_()


def as_loaded(parameter: Tensor) -> Tensor:
    """A parameter as it was loaded.

    SGLang keeps FP8 with a scale a row as a transposed view of `[rows, columns]`, and 4-bit experts by bytes.
    """
    if parameter.dtype == torch.uint8:
        return parameter.view(torch.int32)
    is_transposed = parameter.dim() == 2 and not parameter.is_contiguous() and parameter.t().is_contiguous()
    return parameter.t() if is_transposed else parameter


def _check_dtype(name: str, parameter: Tensor, rule: ServerParameter, format: ServedFormat) -> None:
    """Refuses a quantised server's parameter in another dtype than the trainer sends, or with requantised scales."""
    expected = format.served_dtype_of(rule.parts[0].box.name, "")
    found = str(parameter.dtype).removeprefix("torch.")
    if found != (expected or found):
        raise LayoutError(f"SGLang holds {name} in {found}, and {format.name} has it in {expected}", name)
    if getattr(parameter, "format_ue8m0", False):
        raise LayoutError(
            f"SGLang has rounded {name} to powers of two: live updates need the scales as they were sent; use "
            "--fp8-gemm-backend triton",
            name,
        )


def check_plain(model: nn.Module) -> None:
    """Refuses a live model whose weights SGLang has rearranged after loading, even with unchanged shapes.

    Weights in a format of `FORMATS` are as they were loaded.

    Raises:
        LayoutError: names the module, the rearrangement, and the option that avoids it.
    """
    format = format_of(getattr(model, "config", None))
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "quant_method", None)):
            for flag, change in REPACKED.items():
                if getattr(holder, flag, False) is True:
                    raise LayoutError(
                        f"SGLang keeps the weights of {name} {change}: live updates need them plain", name
                    )
        if format is None and getattr(getattr(module, "quant_method", None), "quant_config", None) is not None:
            raise LayoutError(f"SGLang serves {name} quantized: live updates need plain weights", name)
