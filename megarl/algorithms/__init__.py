"""Algorithms, one file each.

A new algorithm is a file with its config and class, a line in `ALGORITHMS` and a file in configs/algorithm/. See
docs/adding_an_algorithm.md.
"""

from typing import Any

from megarl.algorithms.base import Algorithm, AlgorithmConfig, RLConfig
from megarl.algorithms.cispo import CISPO, CISPOConfig
from megarl.algorithms.dapo import DAPO, DAPOConfig
from megarl.algorithms.decoupled_ppo import DecoupledPPO, DecoupledPPOConfig
from megarl.algorithms.dpo import DPO, DPOConfig
from megarl.algorithms.dr_grpo import DrGRPO, DrGRPOConfig
from megarl.algorithms.gdpo import GDPO, GDPOConfig
from megarl.algorithms.grpo import GRPO, GRPOConfig
from megarl.algorithms.gspo import GSPO, GSPOConfig
from megarl.algorithms.ipo import IPO, IPOConfig
from megarl.algorithms.kto import KTO, KTOConfig
from megarl.algorithms.opd import OPD, OPDConfig
from megarl.algorithms.orpo import ORPO, ORPOConfig
from megarl.algorithms.ppo import PPO, PPOConfig
from megarl.algorithms.preference import PreferenceAlgorithm, PreferenceConfig
from megarl.algorithms.reinforce import Reinforce, ReinforceConfig
from megarl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from megarl.algorithms.remax import ReMax, ReMaxConfig
from megarl.algorithms.reward_model import RewardModel, RewardModelConfig
from megarl.algorithms.rloo import RLOO, RLOOConfig
from megarl.algorithms.simpo import SimPO, SimPOConfig

# The config and the class of each algorithm, by the name that `algorithm=NAME` takes.
ALGORITHMS: dict[str, tuple[type[AlgorithmConfig], Any]] = {
    # method=rl
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
    "opd": (OPDConfig, OPD),
    # method=preference
    "dpo": (DPOConfig, DPO),
    "ipo": (IPOConfig, IPO),
    "kto": (KTOConfig, KTO),
    "orpo": (ORPOConfig, ORPO),
    "simpo": (SimPOConfig, SimPO),
    "reward_model": (RewardModelConfig, RewardModel),
}


def algorithm_of(config: AlgorithmConfig) -> Any:
    """Builds the algorithm of this config: an `Algorithm`, a `PreferenceAlgorithm` or a `RewardModel`."""
    return next(algorithm for kind, algorithm in ALGORITHMS.values() if kind is type(config))(config)


def name_of(config: AlgorithmConfig) -> str:
    """Returns the `algorithm=` name of this config."""
    return next(name for name, (kind, _) in ALGORITHMS.items() if kind is type(config))


__all__ = [
    "ALGORITHMS",
    "GRPO",
    "Algorithm",
    "AlgorithmConfig",
    "GRPOConfig",
    "OPDConfig",
    "PreferenceAlgorithm",
    "PreferenceConfig",
    "RLConfig",
    "RewardModelConfig",
    "algorithm_of",
    "name_of",
]
