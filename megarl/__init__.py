"""megarl: RL post-training of language models on Megatron-core with SGLang rollouts."""

__version__ = "0.1.0"
