"""Prepares a global batch for the model: balancing, microbatches, context parallelism, schedules."""
