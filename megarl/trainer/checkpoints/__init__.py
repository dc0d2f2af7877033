"""Checkpoints of a run: the saver, its manifest, the trainer's state and the random generators."""
