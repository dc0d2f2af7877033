"""Predicts what a run would be, and what would stop it, before anything is started."""
