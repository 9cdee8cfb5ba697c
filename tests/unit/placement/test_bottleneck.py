"""What is stuck is found, and the one or two transfers that let it out."""

from __future__ import annotations

import numpy as np
import pytest

from moe_placement.copy_limits import CopyLimits
from moe_placement.step import bottleneck, exchange, opening
from moe_placement.step.opening import Openings
from moe_placement.step.residual import Residual


def settled(load: list[float], ranks: list[list[int]]) -> Residual:
    """One layer, ranks of speed 1; load in parts of what a rank should serve."""
    slots = np.array([ranks], dtype=np.int32)
    return Residual.even(np.array([load]), slots, np.ones(len(ranks)))


def openings(residual: Residual, limits: CopyLimits | None = None, **more: bool) -> Openings:
    limits = limits or CopyLimits()
    shape = residual.slots_LRS.shape
    given = opening.offers(residual, residual.absorb(), np.full(shape[1], shape[2]), limits)
    found = bottleneck.find(residual, bottleneck.press(residual))
    return opening.choose(residual, found, given, limits, np.zeros(shape, dtype=np.bool_), **more)


def named(found: Openings) -> list[tuple[int, int, int]]:
    """(rank, slot, expert) of each."""
    return list(
        zip(found.rank_M.tolist(), found.slot_M.tolist(), found.expert_M.tolist(), strict=True)
    )


def test_an_excess_shared_by_ranks_is_one_bottleneck() -> None:
    # Ranks 0 and 1 share expert 0 and hold 2.4 together; rank 2 alone holds 1.1; rank 3 has room.
    residual = settled([1.4, 0.5, 0.5, 1.1, 0.2], [[0, 1], [0, 2], [3, -1], [4, -1]])
    found = bottleneck.find(residual, bottleneck.press(residual))
    assert found.expert_B.tolist() == [0, 3]
    assert found.excess_B.tolist() == pytest.approx([0.4, 0.1])


def test_a_layer_without_excess_has_none() -> None:
    residual = settled([0.5, 0.5], [[0], [1]])
    assert len(bottleneck.find(residual, bottleneck.press(residual)).expert_B) == 0


def test_pressure_stops_where_no_tokens_can_be_pushed() -> None:
    # Rank 0 could push expert 1 to rank 1, but serves hardly any of it.
    residual = settled([1.2, 0.05, 1.0], [[0, 1], [1, 2], [-1, -1]])
    pressure = bottleneck.press(residual)
    assert pressure.by_expert_F.tolist() == pytest.approx([0.25, 0.05, 0.05])


def test_of_free_slots_that_relieve_alike_the_one_with_most_room_takes_the_copy() -> None:
    residual = settled([1.5, 0.4, 0.2], [[0, -1], [1, -1], [2, -1]])
    assert named(openings(residual)) == [(2, 1, 0)]


def test_a_copy_gives_way_that_others_can_stand_in_for() -> None:
    # Rank 1's copy of 1 is spare: ranks 2 and 3 have room for all of it. Copy 2 is the only one.
    residual = settled([1.5, 0.6, 0.3, 0.3, 0.3], [[0, -1], [1, 2], [1, 3], [1, 4]])
    residual.slots_LRS[0, 0, 1] = -1
    (found,) = named(openings(residual))
    assert found[2] == 0
    assert residual.slots_LRS[0, found[0], found[1]] == 1


def test_limits_of_copies_are_kept() -> None:
    ranks = [[0, 2], [1, 2], [3, 4], [3, 5]]
    load = [1.3, 0.2, 0.1, 0.2, 0.2, 0.2]
    assert {slot[2] for slot in named(openings(settled(load, ranks)))} == {0}
    assert named(openings(settled(load, ranks), CopyLimits(1, 1))) == []
    assert named(openings(settled(load, ranks), CopyLimits(2))) == []


def test_an_excess_larger_than_one_rank_takes_gets_several_copies() -> None:
    residual = settled([3.4, 0.2, 0.2, 0.2, 0.0], [[0, 4], [1, -1], [2, -1], [3, -1]])
    found = openings(residual)
    assert sorted(found.rank_M.tolist()) == [1, 2, 3]
    assert found.relief_M.tolist() == pytest.approx([0.8, 0.8, 0.8])


def test_an_expert_gives_up_copies_only_while_there_is_room_for_it() -> None:
    # Three ranks serve a third of expert 1 each and could take half of that on top: once.
    ranks = [[0, 5], [1, 2], [1, 3], [1, 4]]
    residual = settled([2.0, 1.0, 0.5, 0.5, 0.5, 0.0], ranks)
    assert residual.room_Q().sum() == pytest.approx(0.5)
    found = openings(residual)
    assert found.relief_M[0] == pytest.approx(0.5)
    assert found.relief_M[1:].sum() < 0.2
    # With room for all of it elsewhere all three copies may go.
    ranks = [[0, 5], [1, 2], [1, 3], [1, 4], [1, 6]]
    residual = settled([3.0, 0.8, 0.1, 0.1, 0.1, 0.0, 0.0], ranks)
    found = openings(residual)
    assert (residual.slots_LRS[0, found.rank_M, found.slot_M] == 1).all()
    assert len(found) > 1


def test_at_any_price_means_one_even_if_it_relieves_nothing() -> None:
    residual = settled([1.2, 0.9, 0.9, 0.4], [[0, -1], [1, 2], [1, 3], [2, 3]])
    residual.slots_LRS[0, 0, 1] = -1
    assert len(openings(residual, at_any_price=True)) == 1


@pytest.mark.parametrize(("on_rank_3", "to"), [(1.0, (0, 1, 3)), (0.9, (3, 1, 3))])
def test_who_locks_room_up_makes_way_for_the_copy(on_rank_3: float, to: tuple[int, ...]) -> None:
    # Rank 2 has room for 0.7 and holds two only copies; the lighter one goes where 1 is spare.
    ranks = [[0, 1], [0, 1], [2, 3], [4, 1]]
    residual = settled([2.2, 0.0, 0.2, 0.1, on_rank_3], ranks)
    shape = residual.slots_LRS.shape
    none = np.zeros(shape, dtype=np.bool_)
    given = opening.offers(residual, residual.absorb(), np.full(4, 2), CopyLimits())
    found = bottleneck.find(residual, bottleneck.press(residual))
    pair = exchange.detours(residual, found, given, CopyLimits(), none)
    assert named(pair) == [(2, 1, 0), to]


def test_without_spare_copies_two_experts_change_places() -> None:
    residual = settled([0.8, 0.6, 0.3, 0.3], [[0, 1], [2, 3]])
    shape = residual.slots_LRS.shape
    given = opening.offers(residual, residual.absorb(), np.full(2, 2), CopyLimits())
    found = exchange.swaps(
        residual,
        bottleneck.press(residual),
        np.array([True]),
        given,
        np.zeros(shape, dtype=np.bool_),
    )
    assert named(found) == [(1, 0, 1), (0, 1, 2)]
