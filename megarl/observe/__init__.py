"""Outputs of a run: metrics, logs, progress in the terminal, the curve and the summary at the end."""
