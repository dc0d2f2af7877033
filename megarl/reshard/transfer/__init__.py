"""One rank's work in a transfer: packing of shards or full tensors, deltas, digests, the store, transports."""
