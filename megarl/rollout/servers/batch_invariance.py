"""SGLang's batch-invariant mode, for the servers of a deterministic run on GPUs.

`enable_deterministic_inference` replaces matrix products, norms, softmax and attention by kernels that compute a row
alike in every batch. Ranks add by one NCCL tree. A token is sampled by a seed of its request, not by the server's.
The user's own options that it overrides, or that change how ranks add, are refused here. SGLang itself would start
all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.knobs import UserError

ARGUMENTS: dict[str, Any] = {"enable_deterministic_inference": True}
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for products that the mode leaves to cuBLAS
DTYPES = ("bfloat16", "float16")  # of its attention backends
ATTENTION = (None, "fa3", "fa4", "flashinfer", "triton")  # SGLang, DETERMINISTIC_ATTENTION_BACKEND_CHOICES
# ServerArgs that the mode does not go with, each with the values that it takes, and the reason.
TAKES: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_deterministic_inference": ((True,), "it is the mode"),
    "rl_on_policy_target": ((None,), "it follows another trainer's arithmetic"),
    "attention_backend": (ATTENTION, "others split keys by the batch"),
    "prefill_attention_backend": (ATTENTION, "others split keys by the batch"),
    "decode_attention_backend": (ATTENTION, "others split keys by the batch"),
    "sampling_backend": ((None, "pytorch"), "others have no seed of a request"),
    "speculative_algorithm": ((None,), "tokens are checked in batches of other shapes"),
    "bf16_gemm_backend": (("auto", "torch"), "others choose kernels by the rows"),
    "moe_a2a_backend": (("none",), "tokens arrive in an order of their own"),
    "disable_custom_all_reduce": ((True,), "ranks add in NCCL's tree"),
    "enable_torch_symm_mem": ((False,), "ranks add in NCCL's tree"),
    "enable_symm_mem": ((False,), "ranks add in NCCL's tree"),
    "enable_mscclpp": ((False,), "ranks add in NCCL's tree"),
    "enable_nccl_nvls": ((False,), "ranks add in NCCL's tree"),
    "enable_quant_communications": ((False, None), "ranks add in NCCL's tree"),
    "flashinfer_allreduce_fusion_backend": ((None,), "ranks add in NCCL's tree"),
    "enable_fused_moe_sum_all_reduce": ((False,), "ranks add in NCCL's tree"),
    "enable_torch_compile": ((False,), "compiled products are no longer the mode's"),
}


LATENT = ("triton", "fa3", "fa4")  # for latent attention, with the prefix cache


def check_latent(sglang: Mapping[str, Any]) -> None:
    """Refuses latent attention where SGLang would choose its backend: on Blackwell it chooses one without the mode.

    Raises:
        UserError: naming the argument and the backends that serve.
    """
    backend = sglang.get("attention_backend")
    if backend not in LATENT:
        raise UserError(
            f"sglang.attention_backend={backend or 'auto'} does not go with deterministic=true and latent attention; "
            f"set it to one of {', '.join(LATENT)} (fa4 on Blackwell only)"
        )


def check(dtype: str, kv_cache_dtype: str, sglang: Mapping[str, Any]) -> None:
    """Refuses servers that the mode does not cover.

    Raises:
        UserError: naming the knob or the argument, and the values that serve.
    """
    if dtype not in DTYPES:
        raise UserError(
            f"server.dtype={dtype} must be {' or '.join(DTYPES)} with deterministic=true on GPUs, where "
            "SGLang's batch-invariant attention takes 16 bits; change one of them"
        )
    if kv_cache_dtype != "auto":
        raise UserError(
            f"server.kv_cache_dtype={kv_cache_dtype} must be auto with deterministic=true; change one of them"
        )
    for name, (values, reason) in TAKES.items():
        if name in sglang and sglang[name] not in values:
            serves = " or ".join(str(value) for value in values if value is not None) or "left out"
            raise UserError(
                f"sglang.{name}={sglang[name]} does not go with deterministic=true: {reason}; it must be {serves}"
            )
