"""A placement is made whole with the fewest transfers, within slots and limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.plan import SlotsLRS
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement, copies, faults, received
from moe_placement.walk import repair


def whole(
    load: list[float], slots: SlotsLRS, slots_R: list[int], limits: CopyLimits | None = None
) -> SlotsLRS:
    """One layer, ranks of speed 1."""
    ranks = np.array(slots_R), np.ones(len(slots_R))
    return repair.whole(np.array([load]), slots, *ranks, limits or CopyLimits())


@st.composite
def broken(draw: st.DrawFn) -> tuple[np.ndarray, SlotsLRS, np.ndarray, CopyLimits]:
    """Load, what is left of a placement, slots of ranks whose room is enough, limits."""
    num_ranks, num_experts = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    slots_R = np.array(draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks)))
    while np.minimum(slots_R, num_experts).sum() < num_experts:
        slots_R = slots_R + 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = int(slots_R.max()) + draw(st.integers(0, 2))
    placed = np.full((2, num_ranks, width), -1, dtype=np.int32)
    for layer in range(2):
        for rank in range(num_ranks):
            filled = int(rng.integers(0, min(width, num_experts) + 1))
            where = rng.permutation(width)[:filled]
            placed[layer, rank, where] = rng.permutation(num_experts)[:filled]
    load = rng.choice([0.0, 1.0, 10.0], (2, num_experts)) * rng.random((2, num_experts))
    least = draw(st.integers(1, 3))
    limits = CopyLimits(least, draw(st.sampled_from([None, least, least + 1])))
    return load, placed, slots_R, limits.within_reach(num_experts, slots_R)


@settings(deadline=None, max_examples=400)
@given(broken())
def test_every_expert_is_covered_within_slots_and_limits(
    case: tuple[np.ndarray, SlotsLRS, np.ndarray, CopyLimits],
) -> None:
    load, placed, slots_R, limits = case
    again = repair.whole(load, placed, slots_R, np.ones(len(slots_R)), limits)
    num_experts = load.shape[1]
    capacity = Capacity.of(slots_R.tolist())
    assert not list(faults(Placement.even(again), np.full(2, num_experts), capacity))
    count = copies(again, num_experts)
    assert (count <= limits.most(len(slots_R))).all()
    if (slots_R == slots_R[0]).all():
        assert (count >= limits.min_copies).all(), "alike ranks always find an exchange"
    stayed = (again == placed) | (again == -1) | (placed == -1)
    arrived = again[~stayed]
    assert received(placed, again) >= len(arrived), "who stays keeps its slot"
    same = repair.whole(load, again, slots_R, np.ones(len(slots_R)), limits)
    assert np.array_equal(same, again), "what is whole stays as it is"


@settings(deadline=None, max_examples=200)
@given(broken())
def test_covering_takes_one_transfer_an_expert(
    case: tuple[np.ndarray, SlotsLRS, np.ndarray, CopyLimits],
) -> None:
    load, placed, slots_R, _ = case
    ranks = np.full(len(slots_R), placed.shape[2]), np.ones(len(slots_R))
    work = repair.Repair(load, placed, *ranks, CopyLimits())
    missing = int((copies(placed, load.shape[1]) == 0).sum())
    uncovered = work.cover()
    assert received(placed, work.slots_LRS) == missing - len(uncovered)
    assert int((copies(work.slots_LRS, load.shape[1]) == 0).sum()) == len(uncovered)
    if placed.shape[2] * len(slots_R) >= load.shape[1]:
        assert not uncovered


def test_the_most_loaded_goes_where_most_room_is() -> None:
    slots = np.array([[[0, -1], [1, -1], [2, -1]]], dtype=np.int32)
    again = whole([4.0, 1.0, 3.0, 5.0, 2.0], slots, [2, 2, 2])
    assert again.tolist() == [[[0, -1], [1, 3], [2, 4]]]


def test_a_cold_copy_gives_way_before_a_hot_one() -> None:
    slots = np.array([[[0, 1], [0, 1], [2, 3]]], dtype=np.int32)
    again = whole([30.0, 2.0, 1.0, 1.0, 2.0], slots, [2, 2, 2])
    assert copies(again, 5).tolist() == [[2, 1, 1, 1, 1]]


def test_of_copies_that_others_can_stand_in_for_the_coldest_gives_way() -> None:
    slots = np.array([[[0, 1], [0, 2], [1, 3], [4, 5]]], dtype=np.int32)
    again = whole([0.5, 0.4, 0.3, 0.6, 2.0, 0.0, 0.05], slots, [2] * 4)
    assert again.tolist() == [[[0, 1], [0, 2], [6, 3], [4, 5]]]


def test_a_free_slot_is_taken_before_a_copy_gives_way() -> None:
    slots = np.array([[[0, 1, -1], [0, 1, -1]]], dtype=np.int32)
    again = whole([5.0, 5.0, 1.0], slots, [3, 3])
    assert again.tolist() == [[[0, 1, 2], [0, 1, -1]]]


def test_ranks_above_their_slots_keep_what_is_nowhere_else() -> None:
    slots = np.array([[[0, 1, 2], [2, 3, -1]]], dtype=np.int32)
    assert whole([1.0, 1.0, 9.0, 1.0], slots, [2, 2]).tolist() == [[[0, 1, -1], [2, 3, -1]]]


def test_a_rank_that_lost_a_slot_hands_its_lightest_expert_on() -> None:
    slots = np.array([[[0, 1, 2], [3, -1, -1]]], dtype=np.int32)
    again = whole([5.0, 1.0, 4.0, 2.0], slots, [2, 3])
    assert again.tolist() == [[[0, -1, 2], [3, 1, -1]]]


def test_a_rank_without_slots_is_emptied() -> None:
    slots = np.array([[[0, 1], [1, -1]]], dtype=np.int32)
    assert whole([1.0, 1.0], slots, [0, 2]).tolist() == [[[-1, -1], [1, 0]]]


@pytest.mark.parametrize("least", [1, 2])
def test_copies_below_the_limit_are_made(least: int) -> None:
    slots = np.array([[[0, 1, -1], [2, -1, -1], [-1, -1, -1]]], dtype=np.int32)
    again = whole([3.0, 2.0, 1.0], slots, [2, 2, 2], CopyLimits(least, least))
    assert copies(again, 3).tolist() == [[least] * 3]


def test_a_copy_that_only_finds_its_own_rank_makes_another_expert_move() -> None:
    # Expert 2 is short of a copy, and the only free slot is where it is already.
    slots = np.array([[[0, 1], [0, 1], [2, -1]]], dtype=np.int32)
    again = whole([1.0, 1.0, 1.0], slots, [2, 2, 2], CopyLimits(2))
    assert copies(again, 3).tolist() == [[2, 2, 2]]
    assert received(slots, again) == 2


def test_without_load_experts_count_alike() -> None:
    slots = np.array([[[0, 1, -1], [2, -1, -1]]], dtype=np.int32)
    assert whole([0.0, 0.0, 0.0, 0.0], slots, [3, 3]).tolist() == [[[0, 1, -1], [2, 3, -1]]]
