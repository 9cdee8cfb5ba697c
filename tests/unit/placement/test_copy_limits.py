"""Limits of copies: what is refused, and what fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_placement.copy_limits import CopyLimits, CopyLimitsError, most_alike
from moe_placement.full import extra_copies
from moe_placement.placement import copies, holders


@pytest.mark.parametrize(
    ("fewest", "most", "words"),
    [
        (0, None, "min_copies is 0: every expert needs a copy"),
        (3, 2, "max_copies is 2, min_copies 3: raise max_copies or lower min_copies"),
    ],
)
def test_limits_that_make_no_sense_are_refused(fewest: int, most: int | None, words: str) -> None:
    with pytest.raises(CopyLimitsError, match=words):
        CopyLimits(fewest, most)


def test_min_copies_must_fit_into_the_slots() -> None:
    CopyLimits(2).check(4, np.array([4, 4]))
    with pytest.raises(
        CopyLimitsError, match="min_copies is 2, but 8 slots on 2 ranks hold at most 1"
    ):
        CopyLimits(2).check(5, np.array([4, 4]))


def test_slots_beyond_the_experts_are_no_room_for_copies() -> None:
    """One rank with 100 slots holds an expert once, like any other."""
    assert most_alike(3, np.array([100, 3])) == 2
    assert most_alike(3, np.array([100, 2])) == 1


def test_within_reach_lowers_only_what_is_out_of_reach() -> None:
    assert CopyLimits(3, 4).within_reach(4, np.array([4, 4])) == CopyLimits(2, 4)
    assert CopyLimits(2).within_reach(4, np.array([4, 4, 4])) == CopyLimits(2)
    assert CopyLimits(2).within_reach(4, np.array([1, 1])) == CopyLimits(1)


def test_no_more_copies_than_ranks() -> None:
    assert CopyLimits().most(5) == 5
    assert CopyLimits(1, 9).most(5) == 5
    assert CopyLimits(1, 2).most(5) == 2


@given(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=7))
def test_what_is_said_to_fit_fits(num_experts: int, slots: list[int]) -> None:
    """By construction: dealt out from nothing, every expert gets as many copies as promised."""
    slots_R = np.array(slots)
    most = most_alike(num_experts, slots_R)
    if most == 0:
        return
    limits = CopyLimits(most, most)
    limits.check(num_experts, slots_R)
    empty = np.full((2, len(slots), max(slots)), -1, dtype=np.int32)
    dealt = extra_copies.add(np.ones((2, num_experts)), empty, slots_R, limits)
    assert (copies(dealt, num_experts) == most).all()
    assert ((dealt >= 0).sum(axis=2) == holders(dealt, num_experts).sum(axis=2)).all()
    assert ((dealt >= 0).sum(axis=2) <= slots_R).all()
