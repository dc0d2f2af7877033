"""Pipeline stages know the shapes of their exchanges before a pass, and refuse a schedule that departs from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.actor.batch import schedule
from megarl.actor.batch.exchanges import PlannedExchanges

TOKENS = (8, 4, 12, 6, 2, 10, 16, 14)
HIDDEN = 5


@pytest.fixture(autouse=True)
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The communicator asks for its neighbours' ranks in the world; nothing is sent here."""
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)


def plan(
    rank: int, pp: int, vpp: int = 1, tp: int = 1, tokens: tuple[int, ...] = TOKENS, forward_only: bool = False
) -> Any:
    group = SimpleNamespace(rank=lambda: rank, size=lambda: pp)
    groups: Any = SimpleNamespace(pp=group, pp_rank=rank, is_last_stage=rank == pp - 1, vpp_size=vpp, tp_size=tp)
    config: Any = SimpleNamespace(
        sequence_parallel=tp > 1,
        hidden_size=HIDDEN,
        microbatch_group_size_per_vp_stage=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
    )
    return PlannedExchanges(groups, config, tokens, forward_only)


def received(exchanges: Any, way: int, count: int) -> list[list[int]]:
    """Shapes of the next `count` receives: way 0 of activations, 1 of gradients."""
    return [exchanges._communicate_shapes(None, None, way == 0, way == 1)[way] for _ in range(count)]


def tensor(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, 1, HIDDEN)


def send(exchanges: Any, way: int, values: torch.Tensor) -> None:
    exchanges._communicate_shapes(values if way == 0 else None, values if way == 1 else None, False, False)


@pytest.mark.parametrize("way", [0, 1], ids=["activations", "gradients"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (2, 3), (4, 4)])
def test_each_stage_receives_the_shapes_that_its_neighbour_sends(pp: int, vpp: int, way: int) -> None:
    for rank in range(pp):
        sender, receiver = plan(rank, pp, vpp), plan((rank + (1, -1)[way]) % pp, pp, vpp)
        wraps = rank == (pp - 1, 0)[way]
        shapes = received(receiver, way, len(TOKENS) * (vpp - wraps))
        for shape in shapes:
            send(sender, way, torch.zeros(shape))
        with pytest.raises(RuntimeError, match="beyond the planned ones"):
            send(sender, way, tensor(TOKENS[0]))
        with pytest.raises(RuntimeError, match="beyond the planned ones"):
            received(receiver, way, 1)


def test_microbatches_cross_in_their_order_without_virtual_stages() -> None:
    assert received(plan(1, 2), 0, len(TOKENS)) == [[n, 1, HIDDEN] for n in TOKENS]
    assert received(plan(0, 2), 1, len(TOKENS)) == [[n, 1, HIDDEN] for n in TOKENS]


def test_a_group_of_microbatches_crosses_for_each_virtual_stage_in_turn() -> None:
    tokens = (8, 4, 12, 6)
    expected = [8, 4, 8, 4, 12, 6, 12, 6]
    assert [shape[0] for shape in received(plan(1, 2, 2, tokens=tokens), 0, 8)] == expected
    assert [shape[0] for shape in received(plan(0, 2, 2, tokens=tokens), 1, 8)] == expected
    assert [shape[0] for shape in received(plan(0, 2, 2, tokens=tokens), 0, 4)] == [8, 4, 12, 6]


def test_sequence_parallel_ranks_exchange_their_share() -> None:
    assert received(plan(1, 2, tp=2), 0, len(TOKENS)) == [[n // 2, 1, HIDDEN] for n in TOKENS]


def test_a_pass_forward_exchanges_no_gradients() -> None:
    with pytest.raises(RuntimeError, match="stage 0 receive a gradient beyond the planned ones"):
        received(plan(0, 2, forward_only=True), 1, 1)


def test_a_tensor_of_another_shape_is_not_sent() -> None:
    with pytest.raises(RuntimeError, match=r"send an activation of shape \[9, 1, 5\] in place of \[8, 1, 5\]"):
        send(plan(0, 2), 0, tensor(9))


def test_a_pass_that_leaves_an_exchange_out_is_an_error() -> None:
    exchanges = plan(1, 2, tokens=(8, 4), forward_only=True)
    received(exchanges, 0, 1)
    with pytest.raises(RuntimeError, match=r"left out .* of pipeline stage 1: \{'receive an activation': 1\};"):
        exchanges.check_end()
    received(exchanges, 0, 1)
    exchanges.check_end()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pass_of_several_stages_is_given_the_planned_exchanges(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own would send shapes ahead of each tensor, with the same values."""
    made: list[Any] = []

    class Planned:
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            self.tokens, self.ended = arguments[2], False

        def check_end(self) -> None:
            self.ended = True

    given: dict[str, Any] = {}
    monkeypatch.setattr(schedule, "PlannedExchanges", Planned)
    monkeypatch.setattr(schedule, "get_model_config", lambda ddp: None)
    monkeypatch.setattr(schedule, "get_forward_backward_func", lambda: lambda **arguments: given.update(arguments))
    groups: Any = SimpleNamespace(pp_size=stages, vpp_size=1, collection="collection")
    feed: Any = SimpleNamespace(iterators=lambda microbatches, count: [iter(microbatches)])
    microbatches: Any = [SimpleNamespace(input_ids=range(length)) for length in (3, 5)]
    schedule.run([None], microbatches, feed, lambda *_: None, groups, False)  # type: ignore[list-item]
    expected = ([], None, None) if stages == 1 else (made, made[0], "collection")
    assert (made, given["p2p_communicator"], given["pg_collection"]) == expected
    assert all((planned.tokens, planned.ended) == ([3, 5], True) for planned in made)
