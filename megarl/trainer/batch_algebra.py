"""The batch algebra: how the sequences of a step divide into optimizer steps, replicas and microbatches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.algorithms import RLConfig
from megarl.config import Config, is_paired, longest_sequence


@dataclass(frozen=True)
class BatchAlgebra:
    """Sizes of a step's batch, for sequences of full length."""

    rows: int  # prompts, examples or preferences a step
    per_row: int  # trained sequences a row
    minibatches: int  # optimizer steps a step
    dp: int  # data parallel replicas
    longest: int  # tokens of a sequence
    max_tokens: int  # of a microbatch
    together: int = 1  # sequences that are never parted: the two of a pair
    multiple: int = 1  # the number of microbatches is rounded up to a multiple of this

    @property
    def sequences(self) -> int:
        return self.rows * self.per_row

    @property
    def per_update(self) -> int:
        return self.sequences // self.minibatches

    @property
    def per_replica(self) -> int:
        """Sequences of the replica with the most."""
        return math.ceil(self.per_update // self.together / self.dp) * self.together

    @property
    def per_microbatch(self) -> int:
        """Sequences that fit, at least one unit. A run refuses units that do not fit."""
        return max(1, self.max_tokens // (self.longest * self.together)) * self.together

    @property
    def microbatches(self) -> int:
        """Microbatches of an optimizer step on each replica."""
        return math.ceil(math.ceil(self.per_replica / self.per_microbatch) / self.multiple) * self.multiple

    def equations(self, names: tuple[str, str]) -> list[tuple[str, str, str]]:
        """Rows of (quantity, equation, meaning). `names` are the nouns for a row and its sequences."""
        row, sequence = names
        step = f"{self.rows} {row} x {self.per_row} {sequence} = {self.sequences} sequences"
        if self.per_row == 1:
            step = f"{self.rows} {row} = {self.sequences} sequences"
        update = f"{self.sequences} sequences / {self.minibatches} minibatches = {self.per_update}"
        fits = f"floor({self.max_tokens} tokens / {self.longest * self.together})"
        if self.together > 1:
            fits += f" x {self.together}"
        count = f"ceil({self.per_replica} / {self.per_microbatch})"
        if self.multiple > 1:
            count += f", to a multiple of pp {self.multiple}"
        return [
            ("a step", step, ""),
            ("an optimizer step", update, ""),
            ("a replica", f"{self.per_update} / dp {self.dp} = {self.per_update / self.dp:g}", "evened out by FLOPs"),
            ("a microbatch", f"{fits} = {self.per_microbatch}", "sequences of full length"),
            ("microbatches", f"{count} = {self.microbatches}", "of an optimizer step, where all have full length"),
            ("tokens of a step", f"{self.sequences} x {self.longest} = {self.sequences * self.longest:,}", "at most"),
        ]


def batch_of(config: Config) -> BatchAlgebra:
    """The algebra of the configured batch."""
    per_row, minibatches, together = 1, 1, 1
    if config.method == "rl" and isinstance(config.algorithm, RLConfig):
        per_row, minibatches = config.gconfig.n_samples, config.algorithm.n_minibatches
    elif is_paired(config):
        per_row = together = 2
    parallel, max_tokens = config.parallel, config.actor.max_tokens_per_mb
    return BatchAlgebra(
        rows=config.train_dataset.batch_size,
        per_row=per_row,
        minibatches=max(1, minibatches),  # the algorithm's own check refuses values below 1
        dp=parallel.sizes()["dp_size"],
        longest=max(1, min(longest_sequence(config) or max_tokens, max_tokens)),
        max_tokens=max_tokens,
        together=together,
        multiple=parallel.pp_size if parallel.vpp_size > 1 else 1,
    )
