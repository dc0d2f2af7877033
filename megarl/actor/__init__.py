"""The actor: HF checkpoints on Megatron-core, trained on packed batches. With parallel/, the only place that imports
Megatron."""
