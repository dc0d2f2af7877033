"""Reads a run's files as they grow, and makes the page of the dashboard and of the report."""
