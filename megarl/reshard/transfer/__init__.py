"""One rank's work in a transfer: shards or whole tensors, deltas, digests, transports."""
