"""Bytes and parameters of a rank, from the configuration alone."""
