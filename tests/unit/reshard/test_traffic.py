"""Traffic of a plan, as a run's folder keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from test_planner import World, worlds
from test_relay import of_alike_servers

from megarl.reshard.plan import traffic as module
from megarl.reshard.plan.holdings import Holdings
from megarl.reshard.plan.planner import plan
from megarl.reshard.plan.traffic import traffic


def check_sums(facts: dict[str, Any]) -> None:
    received = [0] * len(facts["received"])
    for _, destination, nbytes in facts["pairs"]:
        received[destination] += nbytes
    assert received == facts["received"] == facts["held"]
    assert len(facts["pairs"]) == facts["all_pairs"]
    json.dumps(facts, allow_nan=False)


@settings(max_examples=10)
@given(worlds())
def test_pairs_add_up_to_what_each_rank_sends_and_receives(world: World) -> None:
    sides = Holdings.of(world.sources), Holdings.of(world.destinations)
    facts = traffic(plan(*sides, world.topology(), world.bucket_bytes))
    check_sums(facts)
    sent = [0] * len(facts["sent"])
    for source, _, nbytes in facts["pairs"]:
        sent[source] += nbytes
    assert sent == facts["sent"]
    assert facts["relayed"] == 0


def test_bytes_that_servers_send_on_are_told() -> None:
    relayed = of_alike_servers(2, 16, 1)
    facts = traffic(relayed)
    check_sums(facts)
    assert facts["relayed"] == relayed.bytes_forwarded.sum() > 0


def test_of_too_many_pairs_the_heaviest_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = traffic(of_alike_servers(2, 16, 1))["pairs"]
    monkeypatch.setattr(module, "MAX_PAIRS", 5)
    facts = traffic(of_alike_servers(2, 16, 1))
    assert facts["all_pairs"] == len(everything)
    heaviest = sorted((nbytes for _, _, nbytes in everything), reverse=True)[:5]
    assert sorted((nbytes for _, _, nbytes in facts["pairs"]), reverse=True) == heaviest
