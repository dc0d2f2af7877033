"""megarl: RL post-training of language models on Megatron-core with SGLang rollouts."""

import importlib.util
import os
from typing import Any

__version__ = "0.1.0"

# Trainer and servers share cores: OpenMP threads that spin while they wait slow each other down many times over.
# Read by OpenMP when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Transformer Engine loads a cuDNN of its own choice, the machine's before that of torch's wheels. Attention ends with
# CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED where two versions meet in a process. It searches CUDNN_HOME first.
if importlib.util.find_spec("nvidia") and (_cudnn := importlib.util.find_spec("nvidia.cudnn")):
    os.environ["CUDNN_HOME"] = next(iter(_cudnn.submodule_search_locations or []), "")


def __getattr__(name: str) -> Any:
    """Loads `megarl.shifted_labels` when it is used: importing the package alone does not load torch."""
    if name == "shifted_labels":
        from megarl.types import shifted_labels

        return shifted_labels
    raise AttributeError(f"module 'megarl' has no attribute '{name}'")
