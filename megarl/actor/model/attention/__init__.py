"""Attention over packed sequences, and the layers with a recurrent state that take its place."""
