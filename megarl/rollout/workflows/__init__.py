"""Workflows: they turn a prompt into training data. One file each, small enough to copy; `choose.py` picks one."""
