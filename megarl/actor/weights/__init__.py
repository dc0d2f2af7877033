"""HF tensors in Megatron's native parameters: shard table, loading, exporting."""
