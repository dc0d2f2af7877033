"""The actor: HF checkpoints on Megatron-core, trained on packed batches.

Only this package, `parallel/` and `cpu/` import Megatron.
"""
