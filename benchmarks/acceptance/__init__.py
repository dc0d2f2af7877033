"""Steps, runner and report of `benchmarks/gpu_acceptance.py`."""
