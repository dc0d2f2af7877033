"""Forms of `deterministic=true`. A run chooses one, once, by the machines of its trainer.

same_bits    rollout and trainer compute the same bits, by `ops/row_invariant.py`: without a GPU, in float32
by_library   on GPUs: SGLang's batch-invariant mode, and the deterministic modes of Megatron, torch and libraries.
             Each side repeats its own bits; how far they are apart is measured
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megarl.knobs import UserError


@dataclass(frozen=True)
class Determinism:
    """A form, and the number of summands of products that tensor parallelism may cut, on both sides."""

    form: str = "off"
    summands: int = 0  # of same_bits; by_library adds as the libraries do

    @property
    def is_on(self) -> bool:
        return self.form != "off"

    @property
    def same_bits(self) -> bool:
        return self.form == "same_bits"

    @property
    def by_library(self) -> bool:
        return self.form == "by_library"


OFF = Determinism()
BY_LIBRARY = Determinism("by_library")
# Variables of a trainer rank, each with the values that repeat bits; the first is set where there is none. Megatron's
# own `--deterministic-mode` has the same. NCCL adds in the order of its ring; its trees may differ between runs.
VARIABLES = {
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
}


def same_bits(summands: int) -> Determinism:
    """The form of machines without a GPU, with row-parallel products of so many summands."""
    return Determinism("same_bits", summands)


def choose(is_set: bool, summands: int, on_gpu: bool) -> Determinism:
    """The form of a run. `on_gpu`: its trainer runs on GPUs."""
    if not is_set:
        return OFF
    return BY_LIBRARY if on_gpu else same_bits(summands)


def check_variables(environment: Mapping[str, str]) -> None:
    """Refuses values of the user's own under which a library would not repeat its bits.

    Raises:
        UserError: naming the variable and the values that serve.
    """
    for name, accepted in VARIABLES.items():
        value = environment.get(name)
        if value is not None and not set(value.split(",")) <= set(accepted):
            raise UserError(
                f"{name}={value} does not repeat bits, as deterministic=true requires on GPUs; unset it, or use "
                f"{' or '.join(accepted)}"
            )


def enter(form: Determinism) -> None:
    """With `by_library`, has this process take deterministic algorithms until it ends, in all its engines.

    Libraries read their variables once: call it before the first collective and the first product on a GPU.

    Raises:
        UserError: see `check_variables`.
    """
    if not form.by_library:
        return
    check_variables(os.environ)
    for name, accepted in VARIABLES.items():
        os.environ.setdefault(name, accepted[0])
    import torch  # servers' own processes start without it

    torch.use_deterministic_algorithms(True)


def entered() -> bool:
    """True if this process takes deterministic algorithms."""
    import torch

    return torch.are_deterministic_algorithms_enabled()
