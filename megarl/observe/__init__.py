"""What a run shows of itself: metrics, logs, progress in the terminal, the curve and the summary at its end."""
