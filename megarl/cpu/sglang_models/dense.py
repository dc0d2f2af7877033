"""Dense families for `SGLANG_EXTERNAL_MODEL_PACKAGE`: SGLang's models with `FusedStep` in front."""

from sglang.srt.models import llama, mistral, qwen2, qwen3

from megarl.cpu.sglang_models.fused_step import FusedStep


class LlamaForCausalLM(FusedStep, llama.LlamaForCausalLM):
    """Llama; the class has the name of the architecture in `config.json`."""


class MistralForCausalLM(FusedStep, mistral.MistralForCausalLM):
    """Mistral."""


class Qwen2ForCausalLM(FusedStep, qwen2.Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class Qwen3ForCausalLM(FusedStep, qwen3.Qwen3ForCausalLM):
    """Qwen3."""


EntryClass = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
