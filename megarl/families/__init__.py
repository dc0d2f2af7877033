"""Model families: the shape of each as blocks, and the checks of a checkpoint's config. Imports no Megatron."""

from megarl.families.hf_config import (
    as_scalar,
    carried_prefixes,
    is_scalar,
    padded_vocab_size,
    read_config,
    rotary_inv_freq,
)
from megarl.families.registry import FAMILIES, decoder

__all__ = [
    "FAMILIES",
    "as_scalar",
    "carried_prefixes",
    "decoder",
    "is_scalar",
    "padded_vocab_size",
    "read_config",
    "rotary_inv_freq",
]
