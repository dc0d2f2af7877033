"""Boxes of the checkpoint, and tables of the boxes that ranks hold."""

from __future__ import annotations

import pytest
import torch

from megarl.reshard.plan.holdings import Box, Fragment, Holdings, Topology


@pytest.mark.parametrize(("start", "stop"), [((0,), (0,)), ((3,), (2,)), ((-1,), (2,)), ((0, 0), (2,))])
def test_an_empty_or_crooked_box_is_refused(start: tuple[int, ...], stop: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="is not a box"):
        Box("w", start, stop)


@pytest.mark.parametrize("shape", [(3, 4), (8,), (8, 3)])
def test_a_box_that_leaves_its_tensor_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the box ends at"):
        Box("w", (2, 0), (5, 4)).of(torch.zeros(shape))


def test_a_fragment_whose_view_has_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the view of w has shape \(2, 4\)"):
        Fragment(0, "w", Box("w", (2, 0), (5, 4)), torch.zeros(2, 4))


def test_ranks_that_hold_the_same_share_rows_and_keep_the_order_of_their_list() -> None:
    a, b = (Box("a", (0, 2), (4, 6)), "float32"), (Box("b", (1,), (3,)), "bfloat16")
    holdings = Holdings.of([[b, a], [a], [b, a]])
    assert holdings.holders == ((0, 2), (1,))
    assert [holdings.names[t] for t in holdings.tensor] == ["b", "a", "a"]
    assert holdings.rows_of(0).tolist() == holdings.rows_of(2).tolist() == [0, 1]
    assert holdings.rows_of(1).tolist() == [2]
    assert holdings.nbytes.tolist() == [2 * 2, 16 * 4, 16 * 4]
    assert holdings.start.tolist() == [[1, 0], [0, 2], [0, 2]]
    assert holdings.stop.tolist() == [[3, 1], [4, 6], [4, 6]]


def test_a_dtype_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="'float7' is not a torch dtype"):
        _ = Holdings.of([[(Box("a", (0,), (1,)), "float7")]]).nbytes


def test_servers_take_nodes_of_their_own_or_share_those_of_the_trainer() -> None:
    apart = Topology.of_sizes(6, [2, 4], ranks_per_node=4)
    assert apart.source_node.tolist() == [0, 0, 0, 0, 1, 1]
    assert apart.node.tolist() == [2, 2, 2, 2, 3, 3]
    assert apart.server.tolist() == [0, 0, 1, 1, 1, 1]
    assert Topology.of_sizes(6, [2, 4], 4, first=0).node.tolist() == [0, 0, 0, 0, 1, 1]
    assert Topology.of_sizes(6, [2, 4], 4, first=6).node.tolist() == [1, 1, 2, 2, 2, 2]
