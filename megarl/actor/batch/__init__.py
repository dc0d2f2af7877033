"""A global batch on its way to the model: balancing, microbatches, context parallelism, schedules."""
