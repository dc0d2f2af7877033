"""Model families: the shape of each as blocks, and the checks of a checkpoint's config. Imports no Megatron."""

from megarl.families.adapters import Adapters, adapters_of, with_adapters, without_adapters
from megarl.families.hf_config import (
    as_scalar,
    carried_prefixes,
    is_scalar,
    load_config,
    padded_vocab_size,
    quantisation,
    read_config,
    text_part,
)
from megarl.families.mtp import trains_mtp, with_mtp, without_mtp
from megarl.families.registry import CONTAINERS, FAMILIES, decoder
from megarl.families.rotary import rotary_inv_freq

__all__ = [
    "CONTAINERS",
    "FAMILIES",
    "Adapters",
    "adapters_of",
    "as_scalar",
    "carried_prefixes",
    "decoder",
    "is_scalar",
    "load_config",
    "padded_vocab_size",
    "quantisation",
    "read_config",
    "rotary_inv_freq",
    "text_part",
    "trains_mtp",
    "with_adapters",
    "with_mtp",
    "without_adapters",
    "without_mtp",
]
