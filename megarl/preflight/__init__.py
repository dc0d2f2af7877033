"""Predicts a run's batch, memory and times, and the problems that would stop it, before anything is started."""
