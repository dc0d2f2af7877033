"""A weight sync: the coordinator on rank 0, the trainer's ranks and the servers' ranks."""
