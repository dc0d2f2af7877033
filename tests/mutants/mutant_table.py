"""All bugs that were written by hand; `run_mutants.py` plants them one at a time."""

from __future__ import annotations

import mutant_table_adapters as adapters
import mutant_table_causes as causes
import mutant_table_clusters as clusters
import mutant_table_csrc as csrc
import mutant_table_feed as feed
import mutant_table_fidelity as fidelity
import mutant_table_gpu as gpu
import mutant_table_gpu_reading as gpu_reading
import mutant_table_head as head
import mutant_table_hostile as hostile
import mutant_table_overlap as overlap
import mutant_table_preflight as preflight
import mutant_table_quantised as quantised
import mutant_table_relays as relays
import mutant_table_systems as systems
import mutant_table_training as training
from mutant import Mutant, flat

MUTANTS: list[Mutant] = [
    mutant
    for bugs in (
        *(training.ALGORITHMS, training.ACTOR, training.DATA),
        *(
            systems.ROLLOUT,
            systems.ENVIRONMENTS,
            systems.REWARDS,
            systems.TRAINER,
            systems.LAUNCHER,
            systems.RESHARD,
            systems.OBSERVE,
        ),
        adapters.ADAPTERS,
        quantised.QUANTISED,
        feed.FEED,
        *fidelity.FIDELITY,
        relays.RELAYS,
        overlap.OVERLAP,
        preflight.PREFLIGHT,
        csrc.HEADERS,
        head.HEAD,
        hostile.HOSTILE,
        causes.CAUSES,
        gpu.GPU,
        gpu_reading.READING,
        clusters.CLUSTERS,
    )
    for mutant in flat(bugs)
]
