"""A run as one looks into it: its files read as they grow, and the page of the dashboard and of the report."""
