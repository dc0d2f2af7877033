"""The dense families, for `SGLANG_EXTERNAL_MODEL_PACKAGE`: SGLang's models with `fused_step` in front."""

from sglang.srt.models import llama, mistral, qwen2, qwen3

from megarl.cpu.sglang_models.fused_step import FusedStep


class LlamaForCausalLM(FusedStep, llama.LlamaForCausalLM):
    """Named as in `config.json`, like those below."""


class MistralForCausalLM(FusedStep, mistral.MistralForCausalLM):
    """See above."""


class Qwen2ForCausalLM(FusedStep, qwen2.Qwen2ForCausalLM):
    """See above."""


class Qwen3ForCausalLM(FusedStep, qwen3.Qwen3ForCausalLM):
    """See above."""


EntryClass = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
