"""Workflows: how a prompt becomes training data. One file each, small enough to copy."""
