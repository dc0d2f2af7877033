"""Process groups and the platform under them. With actor/, the only place that imports Megatron."""
