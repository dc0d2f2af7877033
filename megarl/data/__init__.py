"""Reads data sets into batches for RL, SFT and preference training, and generates the bundled tasks."""
