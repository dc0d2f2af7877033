"""Latent attention in SGLang on a CPU without AMX: DeepSeek-V3 and its relatives.

SGLang 0.5.23 computes it there by two functions that fail without AMX. Each is replaced:

- A prefill expands keys and values, and `torch_native_backend.py:312` then reads latent vectors from the cache instead.
  Attention to latent vectors themselves, with the projection absorbed into queries, works for prefill too.
- `factory.py:478` asserts YaRN for rotary positions. Without it, SGLang's rotary positions for other models fit.
"""

from typing import Any

from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

_with_yarn = factory.get_rope_cpu


def _rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    *rest: Any,
) -> Any:
    """SGLang's function of the name `get_rope_cpu`, with and without YaRN."""
    arguments = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)
    if rope_scaling is None:
        return factory.get_rope(*arguments, *rest[:2])  # without the device
    return _with_yarn(*arguments, *rest)


factory.get_rope_cpu = _rope
AttentionBackendRegistry.register("torch_native", lambda layer, batch: AttnForwardMethod.MLA)
