"""Place of each rank, in Megatron's numbering, for any world."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from megatron.core.parallel_state import RankGenerator

from megarl.parallel.config import ParallelConfig
from megarl.parallel.placement import Place, place_of, places

ORDER = "tp-cp-ep-dp-pp"  # the default of Megatron's initialize_model_parallel


def neighbours(parallel: ParallelConfig, *dimensions: str) -> list[list[int]]:
    """Groups the ranks that differ only in the given dimensions."""
    experts = bool({"etp", "ep", "edp"} & set(dimensions))
    others = [d for d in (("etp", "ep", "edp", "pp") if experts else ("tp", "cp", "dp", "pp")) if d not in dimensions]

    def key(rank: int) -> tuple[int, ...]:
        place = place_of(parallel, rank)
        return tuple(getattr(place, d) for d in others)

    ranks = sorted(range(parallel.world_size()), key=key)
    return sorted(list(group) for _, group in groupby(ranks, key=key))


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp_size": 2, "pp_size": 2},
        {"tp_size": 2, "cp_size": 2, "dp_size": 3, "pp_size": 2, "ep_size": 6, "etp_size": 1},
        {"tp_size": 2, "dp_size": 4, "ep_size": 2},
        {"tp_size": 4, "dp_size": 2, "ep_size": 4, "etp_size": 2},
        {"tp_size": 8, "pp_size": 4, "cp_size": 2, "dp_size": 16, "ep_size": 32, "etp_size": 1},
        {"dp_size": 8, "ep_size": 2, "etp_size": 2},
    ],
)
def test_places_match_megatrons_rank_generators(sizes: dict[str, Any]) -> None:
    parallel = ParallelConfig(**sizes)
    tp, pp, cp, dp = parallel.tp_size, parallel.pp_size, parallel.cp_size, parallel.dp_size or 1
    etp, ep = parallel.expert_tp_size, parallel.ep_size
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    expert = RankGenerator(tp=etp, ep=ep, dp=tp * cp * dp // (etp * ep), pp=pp, cp=1, order=ORDER)
    for dimensions, generator, token in [
        (("tp",), dense, "tp"),
        (("cp",), dense, "cp"),
        (("dp",), dense, "dp"),
        (("pp",), dense, "pp"),
        (("dp", "cp"), dense, "dp-cp"),
        (("etp",), expert, "tp"),
        (("ep",), expert, "ep"),
        (("edp",), expert, "dp"),
        (("etp", "ep"), expert, "tp-ep"),
    ]:
        assert neighbours(parallel, *dimensions) == sorted(generator.get_ranks(token)), dimensions


def test_places_are_in_rank_order() -> None:
    parallel = ParallelConfig(tp_size=2, cp_size=2, dp_size=2, pp_size=2, ep_size=4, etp_size=2)
    all_places = places(parallel)
    assert all_places[0] == Place(tp=0, cp=0, dp=0, pp=0, etp=0, ep=0, edp=0)
    assert all_places[7] == Place(tp=1, cp=1, dp=1, pp=0, etp=1, ep=3, edp=0)
    assert all_places[9] == Place(tp=1, cp=0, dp=0, pp=1, etp=1, ep=0, edp=0)
    assert len(set(all_places)) == parallel.world_size() == 16


def test_a_rank_outside_the_world_has_no_place() -> None:
    with pytest.raises(ValueError, match="rank 2 is not in a world of 2"):
        place_of(ParallelConfig(tp_size=2), 2)
