"""Checkpoints of a run: the saver, its manifest, the trainer's own state and random generators."""
