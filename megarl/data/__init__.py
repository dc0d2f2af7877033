"""Data sets in, batches out: the bundled task, GSM8K and folders in its layout, for RL and for SFT."""
