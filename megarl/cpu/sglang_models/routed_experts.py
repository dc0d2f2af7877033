"""Memory for the experts that a server on CPU records of each token (`enable_return_routed_experts`).

SGLang pins it for copies from a GPU, by CUDA. SGLang imports every module of this package in its scheduler.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS


def _allocate(dims: tuple[int, ...], *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


ALLOC_MEMORY_FUNCS["cpu"] = _allocate
