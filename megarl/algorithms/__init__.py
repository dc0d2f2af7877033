"""Algorithms, one file each. A new one is a file with its config and class, a line here and a file in
configs/algorithm/ (docs/adding_an_algorithm.md)."""

from typing import Any

from megarl.algorithms.base import Algorithm, AlgorithmConfig, RLConfig
from megarl.algorithms.cispo import CISPO, CISPOConfig
from megarl.algorithms.dapo import DAPO, DAPOConfig
from megarl.algorithms.decoupled_ppo import DecoupledPPO, DecoupledPPOConfig
from megarl.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from megarl.algorithms.gdpo import GDPO, GDPOConfig
from megarl.algorithms.grpo import GRPO, GRPOConfig
from megarl.algorithms.gspo import GSPO, GSPOConfig
from megarl.algorithms.ppo import PPO, PPOConfig
from megarl.algorithms.reinforce import Reinforce, ReinforceConfig
from megarl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from megarl.algorithms.remax import ReMax, ReMaxConfig
from megarl.algorithms.rloo import RLOO, RLOOConfig

# By the name that `algorithm=NAME` takes: the config and the class that is given it.
RL_ALGORITHMS: dict[str, tuple[type[RLConfig], Any]] = {
    "grpo": (GRPOConfig, GRPO),
    "dr_grpo": (DrGRPOConfig, DrGRPO),
    "dapo": (DAPOConfig, DAPO),
    "gspo": (GSPOConfig, GSPO),
    "cispo": (CISPOConfig, CISPO),
    "gdpo": (GDPOConfig, GDPO),
    "rloo": (RLOOConfig, RLOO),
    "reinforce": (ReinforceConfig, Reinforce),
    "reinforce_pp": (ReinforcePPConfig, ReinforcePP),
    "remax": (ReMaxConfig, ReMax),
    "ppo": (PPOConfig, PPO),
    "decoupled_ppo": (DecoupledPPOConfig, DecoupledPPO),
}


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    """The RL algorithm of this config."""
    made: Algorithm = next(make for kind, make in RL_ALGORITHMS.values() if kind is type(config))(config)
    return made


__all__ = ["GRPO", "RL_ALGORITHMS", "Algorithm", "AlgorithmConfig", "GRPOConfig", "RLConfig", "algorithm_of"]
