"""megarl: RL post-training of language models on Megatron-core with SGLang rollouts."""

import os

__version__ = "0.1.0"

# Trainer and servers share cores: OpenMP threads that spin while they wait slow each other down many times over.
# Read by OpenMP when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
