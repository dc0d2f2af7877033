"""Starts the ranks and servers of a run, on this machine or a cluster, and watches them."""
