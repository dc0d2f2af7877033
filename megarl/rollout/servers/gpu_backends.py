"""Backends of SGLang servers on GPUs: attention, experts and CUDA graphs, as a run's knobs need them.

SGLang 0.5.23 chooses backends by GPU and model, not by dtype and not for live updates. Five of its choices fail here:

- Attention: fa3, flashinfer and trtllm_mha take 16-bit tensors only. float32 servers get torch_native, because Triton
  multiplies float32 tensors in TF32. RMSNorm's CUDA kernel takes 16 bits too: an environment variable replaces it.
- Experts: on sm100 Qwen3-MoE gets flashinfer_trtllm, which pads and blocks the weights. SGLang would restore and pack
  them around each update, expert by expert. The receiver's digests would not be of the weights in use. Triton's kernels
  read experts in the checkpoint's layout, on every GPU. Shared experts stay a module of their own: where SGLang fuses
  them, the routed ones have another slot.
- FP8 with a scale per block: on sm100 DeepGEMM rounds the scales to powers of two and packs them. Live updates need
  them as they were sent, as Triton's kernels take them.
- Triton's attention compiles no kernel that reads an 8-bit cache before compute capability 8.9. The server would fail
  as it starts.
- CUDA graphs: a co-located server gives up its memory, that of its graphs too. SGLang refuses breakable graphs then,
  which are its default for prefill.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.knobs import UserError
from megarl.parallel import hardware_queues

FLOAT32_ATTENTION = ("torch_native", "triton")
ATTENTION_ARGUMENTS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
REPLICATING = ("a2a", "fi_a2a")  # SGLang, model_overrides/deepseek_v2.py
TRITON_READS_FP8 = (8, 9)  # first compute capability (Triton, backends/nvidia/compiler.py, supported_fp8_dtypes)
PLAIN_EXPERTS = ("triton", "deep_gemm")  # keep weights in the checkpoint's layout (SGLang, UnquantizedFusedMoEMethod)

# Of a co-located server. SGLang's refusal is in runner_backend/breakable_cuda_graph_backend.py. A draft model, which no
# sync brings, is copied to the host with the memory that is given up.
COLOCATED = {
    "enable_memory_saver": True,
    "disable_prefill_cuda_graph": True,
    "enable_draft_weights_cpu_backup": True,
}
COLOCATED_ENVIRONMENT = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}


def arguments(dtype: str, quantization: str = "none") -> dict[str, Any]:
    """ServerArgs of a server on GPUs, unless the user sets them."""
    chosen: dict[str, Any] = {"moe_runner_backend": "triton", "disable_shared_experts_fusion": True}
    if dtype == "float32":
        chosen["attention_backend"] = "torch_native"
    if quantization == "fp8" and (hardware_queues.lowest_major() or 0) >= hardware_queues.BLACKWELL:
        chosen["fp8_gemm_runner_backend"] = "triton"
    return chosen


def environment(dtype: str) -> dict[str, str]:
    """Environment variables of a server on GPUs: all layers of a float32 server run SGLang's torch code."""
    return {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"} if dtype == "float32" else {}


def check_backends(dtype: str, sglang: Mapping[str, Any], colocated: bool) -> None:
    """Refuses the user's own backends that float32, live weight updates or memory that is given up rule out.

    Raises:
        UserError: naming the argument and the backends that serve.
    """
    for name in ATTENTION_ARGUMENTS:
        backend = sglang.get(name)
        if dtype == "float32" and backend is not None and backend not in FLOAT32_ATTENTION:
            raise UserError(
                f"sglang.{name}={backend} takes 16-bit tensors, and server.dtype=float32; use one of "
                f"{', '.join(FLOAT32_ATTENTION)}, leave it out, or set server.dtype=bfloat16"
            )
    if colocated and (argument := _breakable_graphs(sglang)):
        raise UserError(
            f"{argument} gives a server breakable CUDA graphs, which SGLang refuses where memory is given up, as with "
            "server.colocate=true; leave it out, or set server.colocate=false"
        )
    if sglang.get("dcp_replicate_q_proj") or sglang.get("dcp_comm_backend") in REPLICATING:
        raise UserError(
            "sglang.dcp_replicate_q_proj=true keeps copies of query projections that no weight sync renews, and "
            f"sglang.dcp_comm_backend={' or '.join(REPLICATING)} turns it on; leave both out"
        )
    experts = sglang.get("moe_runner_backend")
    if experts is not None and experts not in PLAIN_EXPERTS:
        raise UserError(
            f"sglang.moe_runner_backend={experts} may keep experts in another layout than the checkpoint's, which live "
            f"weight updates cannot write; use one of {', '.join(PLAIN_EXPERTS)}, or leave it out"
        )


def check_cache(
    capability: tuple[int, int] | None, kv_cache_dtype: str, sglang: Mapping[str, Any], default: str
) -> None:
    """Refuses an 8-bit cache on GPUs where Triton's attention would read it.

    `default` is the backend that SGLang takes for the model on GPUs before Hopper, "" if it is not Triton's.

    Raises:
        UserError: naming the GPUs and what serves.
    """
    if kv_cache_dtype == "auto" or capability is None or capability >= TRITON_READS_FP8:
        return
    chosen = {name: sglang.get(name) for name in ATTENTION_ARGUMENTS if sglang.get(name) is not None}
    if "attention_backend" not in chosen and len(chosen) < len(ATTENTION_ARGUMENTS) - 1:  # of prefill, decode or both
        chosen["attention_backend"] = default
    for name in [name for name, backend in chosen.items() if backend == "triton"]:
        raise UserError(
            f"sglang.{name}=triton{'' if name in sglang else ', the default for this model,'} cannot read "
            f"server.kv_cache_dtype={kv_cache_dtype} on GPUs of compute capability {capability[0]}.{capability[1]}, "
            f"below 8.9; set kv_cache_dtype=auto{'' if default else ', or attention_backend=flashinfer'}"
        )


def _breakable_graphs(sglang: Mapping[str, Any]) -> str:
    """The user's argument that asks for breakable CUDA graphs, with its value; "" if there is none."""
    for phase in ("decode", "prefill"):
        if sglang.get(f"cuda_graph_backend_{phase}") == "breakable":
            return f"sglang.cuda_graph_backend_{phase}=breakable"
    if "breakable" in str(settings := sglang.get("cuda_graph_config", "")):
        return f"sglang.cuda_graph_config={settings}"
    if sglang.get("disable_prefill_cuda_graph") is False and not sglang.get("cuda_graph_backend_prefill"):
        return "sglang.disable_prefill_cuda_graph=false"
    return ""
