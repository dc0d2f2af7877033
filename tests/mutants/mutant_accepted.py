"""Survivors that stay: mutants that change nothing a user could notice, with the reason."""

from __future__ import annotations

import re

from mutant import Mutant

ONE_RANK = "with one rank the collective, or the cut, leaves the values as they are"

# By the mutant's name, as `run_mutants.py` prints it, without its line number.
ACCEPTED: dict[str, str] = {
    "megarl/actor/sizes/memory.py: constant: 0 -> 1": "a rank's place in its stage, and all of these need the same",
    "megarl/actor/weights/quantised.py: constant: 0 -> 1": "all ranks of a stage have as many columns of a layer",
    "megarl/reshard/sync/http_pipeline.py: constant: 1 -> 2": (
        "the size of a read, and any length above what has come"
    ),
    "megarl/sandbox/client.py: a program sleeps while its judge works": (
        "each of a pair works for less than the limit of sleep, so the work of the other never reaches it"
    ),
    "megarl/rollout/workflows/tools.py: sign: k1 + 1 -> (k1 - 1)": "a factor of every score, so the order stays",
    "megarl/actor/model/heads.py: comparison: groups.tp_size > 1 -> groups.tp_size >= 1": ONE_RANK,
    "megarl/actor/layer_states.py: all layers have the first microbatch's rows": ONE_RANK,
    "megarl/actor/model/adapters.py: comparison: at < height -> at <= height": "the rows that it adds are none",
    "megarl/rollout/estimates.py: constant: 20 -> 21": "resamples drawn at once, of which the figures do not depend",
    "megarl/rollout/workflows/agent.py: constant: 0 -> 1": "a masked token, of which the figures do not depend",
    "megarl/rollout/estimates.py: constant: 1 -> 2": "resamples drawn at once, of which the figures do not depend",
    "megarl/actor/model/build.py: comparison: groups.vpp_size > 1 -> groups.vpp_size >= 1": (
        "Megatron reads the number of a virtual stage only of models that have some"
    ),
    "megarl/actor/weights/quantised.py: constant: 1 -> 2": "bitsandbytes reads codes in order, in any shape",
    "megarl/algorithms/preference.py: statement: chosen, rejected = chosen.detach(), rejected.detach() -> pass": (
        "the engine detaches every metric before it is kept"
    ),
}


def reason(mutant: Mutant) -> str:
    """Returns why this mutant may survive, "" if it may not."""
    return ACCEPTED.get(re.sub(r":\d+:", ":", mutant.name, count=1), "")
