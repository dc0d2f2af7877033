"""Seconds of the trainer's passes by layout: compute, pipeline bubble and exposed communication.

    compute     FLOPs of the slowest stage / (peak x train_utilisation); at least LAYER_LAUNCH_S a layer and microbatch,
                and the time to read a microbatch's weights and, in backward, to add to its float32 gradients
    bubble      (p - 1) / (m v) of it: p stages, v virtual ones, m microbatches (Narayanan et al. 2021,
                https://arxiv.org/abs/2104.04473). Virtual stages take a multiple of p microbatches
    filling     parallel.tp_comm_overlap pads every microbatch to max_tokens_per_mb. Sequences fill
                floor(tokens / max_tokens_per_mb) + 1 of them, as first-fit does with log-normal lengths in 8
                microbatches or more (91% to 99.6% full)
    exchanges   `communication.py`

Expected loads are even: the trainer balances its ranks, and experts are assumed to be balanced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.actor.sizes.memory import GRADIENT
from megarl.actor.sizes.parameter_counts import RankParameters, rank_parameters
from megarl.parallel.config import ParallelConfig
from megarl.preflight.communication import Communication, Passes, Share, communication
from megarl.preflight.trainer_work import TrainerWork

LAYER_LAUNCH_S = 1e-4  # forward of one layer: about 25 kernels, launched in 4 us each. Assumed, not measured


@dataclass(frozen=True)
class TrainerTimes:
    """Seconds of a step on the trainer; `update` and `scoring` are compute with its bubble."""

    update: float  # of policy and critic
    scoring: float  # log-probs and values before the update
    bubble: float  # of an update, relative to its compute
    updating: Communication
    scoring_traffic: Communication

    @property
    def communication(self) -> Communication:
        return self.updating + self.scoring_traffic

    @property
    def scored_s(self) -> float:
        """Seconds before the update, with exposed communication."""
        return self.scoring + self.scoring_traffic.exposed

    @property
    def total(self) -> float:
        return self.scored_s + self.update + self.updating.exposed


def trainer_times(
    work: TrainerWork,
    parallel: ParallelConfig,
    dp: int,
    recompute: str,
    max_tokens: int,
    parameters: RankParameters | None = None,
) -> TrainerTimes:
    """Estimates a step. `dp` is the resolved dp_size; `parameters`: pipeline rank 0's, if counted before."""
    pp, vpp = parallel.pp_size, parallel.vpp_size
    ranks = parallel.tp_size * pp * parallel.cp_size * dp
    per_replica = math.ceil(work.sequences / work.minibatches / work.together / dp) * work.together * work.mean
    per_update, padded = microbatches(per_replica, max_tokens, parallel)
    count = work.minibatches * per_update
    layers = [sum(map(len, stage)) for stage in parallel.stage_layers(work.model.num_hidden_layers)]
    layer = (1 - work.head) / sum(layers)
    slowest = max(part * layer + (work.head if rank == pp - 1 else 0.0) for rank, part in enumerate(layers)) * pp
    parameters = parameters or rank_parameters(work.model, parallel, 0, work.adapters)
    rate = ranks * work.flops
    compute, launch = work.forward * slowest / rate * padded, count * max(layers) * LAYER_LAUNCH_S
    each = float(count * (parameters.dense + parameters.experts))
    each /= work.cluster.gpu_memory_gb_s * 1e9 * work.cluster.decode_utilisation
    forward = max(compute, launch, each * work.item)
    backward = max(
        (1 if work.frozen else 2) * compute, 2 * launch, each * (work.item + (0 if work.frozen else 2 * GRADIENT))
    )
    backward += forward * work.again[recompute]
    bubble, scoring_bubble = (pp - 1) / (per_update * vpp), (pp - 1) / (count * vpp)
    share = Share(work, parallel, dp, max(layers), per_update, padded, forward, backward, parameters)
    return TrainerTimes(
        update=work.trained * (forward + backward) * (1 + bubble),
        scoring=(work.scored * forward + work.teacher / rate) * (1 + scoring_bubble),
        bubble=bubble,
        updating=communication(share, Passes(work.trained, work.trained, recompute, bubble)),
        scoring_traffic=communication(share, Passes(work.scored, 0, recompute, scoring_bubble)),
    )


def microbatches(tokens: float, max_tokens: int, parallel: ParallelConfig) -> tuple[int, float]:
    """Microbatches of a replica's `tokens` in an optimizer step, and what they hold over the tokens."""
    full = tokens / max_tokens
    count = math.floor(full) + 1 if parallel.tp_comm_overlap else max(1, math.ceil(full))
    if parallel.vpp_size > 1:
        count = math.ceil(count / parallel.pp_size) * parallel.pp_size
    return count, count / full if parallel.tp_comm_overlap else 1.0
