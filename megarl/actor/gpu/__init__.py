"""Parts of an engine that work on GPUs alone, and their checks."""
