"""The load that preflight plans memory for."""

from __future__ import annotations

from megarl import cli
from megarl.preflight.sizing import load_of


def test_a_microbatch_of_mixed_lengths_may_be_full() -> None:
    """Seven sequences of 4608 tokens leave room in a microbatch of 32768, which shorter ones fill."""
    assert load_of(cli.composed(["+experiment=grpo_70b", "actor.max_tokens_per_mb=32768"])).tokens == 32768
