"""Process groups and the platform below them. Only this package and actor/ import Megatron."""
