"""Rollouts of a run: its servers, the weight syncs to them, the batches they sample, and proofs of both."""
