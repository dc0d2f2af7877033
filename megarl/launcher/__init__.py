"""Starts the trainer ranks of a run."""
