"""Mixtures of experts for `SGLANG_EXTERNAL_MODEL_PACKAGE`, as SGLang has them."""

from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [MixtralForCausalLM, Qwen3MoeForCausalLM]
