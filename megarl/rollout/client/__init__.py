"""The client of the rollout servers: requests, answers, and the engine that workflows call."""
