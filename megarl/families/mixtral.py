"""Mixtral: experts in every layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from megarl.families.blocks import Decoder, ExpertNames, Experts
from megarl.families.llama import alike, attention, window_of


def mixtral(config: PretrainedConfig) -> Decoder:
    """Reads Mixtral, whose `intermediate_size` is an expert's."""
    experts = Experts(
        count=config.num_local_experts,
        width=config.intermediate_size,
        topk=config.num_experts_per_tok,
        normalized=True,
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )
    return alike(config, attention(config, window=window_of(config)), experts)
