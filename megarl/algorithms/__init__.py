"""RL algorithms, one file each. A new one is a file with its config and class, and a line here."""

from megarl.algorithms.base import Algorithm, AlgorithmConfig
from megarl.algorithms.grpo import GRPO, GRPOConfig

ALGORITHMS: dict[type[AlgorithmConfig], type[Algorithm]] = {GRPOConfig: GRPO}

__all__ = ["ALGORITHMS", "GRPO", "Algorithm", "AlgorithmConfig", "GRPOConfig"]
