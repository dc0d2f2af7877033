"""The training loops and what stands around them: recovery, and the stop in order."""
