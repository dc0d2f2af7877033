"""Communication buffers."""
