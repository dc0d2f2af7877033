"""Builds Megatron's GPTModel for a HF config: layer backends, attention over packed sequences, heads."""
