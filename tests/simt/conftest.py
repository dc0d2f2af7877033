"""Lets the tests import the emulator, the cases of tests/gpu and the oracle."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("kernels", "gpu", "simt")]
