"""Training loops, their checkpoints, and the orderly stop of a run."""
