"""HF tensors in Megatron's native parameters: which shard lies where, loading, exporting."""
