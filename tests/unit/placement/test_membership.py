"""Ranks are lost, come and leave: what survivors receive, what newcomers get, what goes first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.plan import SlotsLRS
from moe_placement import split
from moe_placement.copy_limits import CopyLimits
from moe_placement.full import full_fractions
from moe_placement.initial import InsufficientSlots
from moe_placement.placement import copies, holders, received
from moe_placement.score import rank_loads
from moe_placement.walk import membership


@st.composite
def groups(draw: st.DrawFn) -> tuple[np.ndarray, SlotsLRS]:
    """Load and a complete plan of a group of 2 to 7 ranks, with or without spare copies."""
    num_ranks, num_experts = draw(st.integers(2, 7)), draw(st.integers(2, 12))
    least = -(-num_experts // num_ranks)
    per_rank = draw(st.integers(least, min(num_experts, least + 2)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = rng.lognormal(0, 1.5, (2, num_experts))
    slots_R = np.full(num_ranks, per_rank)
    slots, _ = full_fractions.plan(load, slots_R, np.ones(num_ranks), CopyLimits())
    spare = draw(st.integers(0, 2))
    return load, np.pad(slots, ((0, 0), (0, 0), (0, spare)), constant_values=-1)


def complete(slots: SlotsLRS, num_experts: int) -> bool:
    alone = holders(slots, num_experts).sum(axis=2) == (slots >= 0).sum(axis=2)
    return bool((copies(slots, num_experts) > 0).all() and alone.all())


def room(slots: SlotsLRS, num_lost: int) -> int:
    return (slots.shape[1] - num_lost) * slots.shape[2]


@settings(deadline=None, max_examples=200)
@given(groups(), st.booleans(), st.data())
def test_a_loss_costs_one_transfer_for_each_expert_that_is_nowhere_else(
    group: tuple[np.ndarray, SlotsLRS], known: bool, data: st.DataObject
) -> None:
    load, slots = group
    num_experts = load.shape[1]
    lost = data.draw(st.sets(st.integers(0, slots.shape[1] - 1), min_size=1, max_size=2))
    survivors = [rank for rank in range(slots.shape[1]) if rank not in lost]
    known_LE = load if known else None
    if room(slots, len(lost)) < num_experts:
        with pytest.raises(InsufficientSlots) as caught:
            membership.repair(slots, survivors, num_experts, load_LE=known_LE)
        short = num_experts - room(slots, len(lost))
        assert [layer for layer, _ in caught.value.uncovered] == [0] * short + [1] * short
        return
    left = slots[:, survivors]
    repaired = membership.repair(slots, survivors, num_experts, load_LE=known_LE)
    assert complete(repaired, num_experts)
    assert received(left, repaired) == int((copies(left, num_experts) == 0).sum())
    gone = (left >= 0) & (repaired != left)
    count_LE = copies(left, num_experts)
    for layer, rank, slot in np.argwhere(gone).tolist():
        assert count_LE[layer, left[layer, rank, slot]] > 1, "only spare copies give way"


def test_uncovered_experts_are_the_least_loaded() -> None:
    slots = np.array([[[0, 1], [2, 3], [4, 5]]], dtype=np.int32)
    load = np.array([[1.0, 1, 3, 9, 2, 1]])
    with pytest.raises(InsufficientSlots, match="cannot hold 6 experts") as caught:
        membership.repair(slots, [0, 2], 6, load_LE=load)
    assert caught.value.uncovered == [(0, 2), (0, 3)]
    slots = np.array([[[0, -1], [1, 2], [3, 3]]], dtype=np.int32)[:, :2]
    with pytest.raises(InsufficientSlots) as caught:
        membership.repair(slots, [0], 3, load_LE=np.array([[1.0, 5.0, 9.0]]))
    assert caught.value.uncovered == [(0, 1)]


@pytest.mark.parametrize(("least", "gives_way"), [(1, 1), (2, 0)])
def test_experts_at_their_least_copies_do_not_give_way(least: int, gives_way: int) -> None:
    slots = np.array([[[0, 1], [0, 1], [0, 2], [3, -1]]], dtype=np.int32)
    load = np.array([[9.0, 0.5, 2.0, 1.0]])
    repaired = membership.repair(slots, [0, 1, 2], 4, load_LE=load, min_copies=least)
    count = copies(slots[:, :3], 4) - copies(repaired, 4)
    assert np.flatnonzero(count[0] > 0).tolist() == [gives_way]


def test_where_nothing_else_is_left_they_do() -> None:
    slots = np.array([[[0, 1], [0, 1], [2, -1]]], dtype=np.int32)
    assert complete(membership.repair(slots, [0, 1], 3, min_copies=2), 3)


def test_layers_may_have_different_numbers_of_experts() -> None:
    slots = np.array([[[0, 1], [2, -1]], [[0, -1], [1, -1]]], dtype=np.int32)
    repaired = membership.repair(slots, [0, 1], np.array([3, 2]))
    assert np.array_equal(repaired, slots)
    slots = np.array([[[0, 1, -1], [2, -1, -1]], [[0, -1, -1], [1, -1, -1]]], dtype=np.int32)
    repaired = membership.repair(slots, [0], np.array([3, 2]))
    assert repaired.tolist() == [[[0, 1, 2]], [[0, 1, -1]]]


@settings(deadline=None, max_examples=100)
@given(groups(), st.data())
def test_a_newcomer_gets_its_part_and_relieves_the_others(
    group: tuple[np.ndarray, SlotsLRS], data: st.DataObject
) -> None:
    load, slots = group
    num_experts, num_ranks = load.shape[1], slots.shape[1]
    lost = data.draw(st.integers(0, num_ranks - 1))
    if room(slots, 1) < num_experts:
        return
    survivors = [rank for rank in range(num_ranks) if rank != lost]
    repaired = membership.repair(slots, survivors, num_experts)
    serving = data.draw(st.integers(-(-num_experts // num_ranks), slots.shape[2]))
    keep: list[int | None] = [*range(num_ranks - 1), None]
    admitted = membership.admit(repaired, keep, num_experts, serving)
    assert complete(admitted, num_experts)
    assert ((admitted[:, -1] >= 0).sum(axis=1) >= num_experts // num_ranks).all()
    kept = admitted[:, :-1]
    assert ((kept == repaired) | (kept == -1)).all(), "who stays receives nothing"
    count_LE = copies(admitted, num_experts)
    over = (admitted >= 0).sum(axis=2) > serving
    for layer, rank in np.argwhere(over).tolist():
        only = admitted[layer, rank][admitted[layer, rank] >= 0]
        assert (count_LE[layer, only] == 1).all(), "nothing more can be given up"


def test_a_newcomer_takes_scarce_experts_of_the_fullest_rank() -> None:
    slots = np.array([[[0, 1, 2, 3], [4, 5, 0, -1]]], dtype=np.int32)
    admitted = membership.admit(slots, [0, 1, None], 6, serving_slots=4)
    assert admitted[0, 2].tolist() == [3, 2, -1, -1]


@settings(deadline=None, max_examples=100)
@given(groups(), st.booleans(), st.integers(0, 4), st.data())
def test_an_evacuation_empties_the_ranks_that_leave(
    group: tuple[np.ndarray, SlotsLRS], known: bool, max_moves: int, data: st.DataObject
) -> None:
    load, slots = group
    num_experts, num_ranks = load.shape[1], slots.shape[1]
    leaving = sorted(data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=2)))
    staying = [rank for rank in range(num_ranks) if rank not in leaving]
    if room(slots, len(leaving)) < num_experts:
        with pytest.raises(InsufficientSlots):
            membership.evacuate(slots, leaving, num_experts)
        return
    stranded = int((copies(slots[:, staying], num_experts) == 0).sum())
    load_LE = load if known else None
    target = membership.evacuate(slots, leaving, num_experts, load_LE=load_LE, max_moves=max_moves)
    assert target.shape == slots.shape
    assert (target[:, leaving] == -1).all()
    assert complete(target[:, staying], num_experts)
    must = membership.evacuate(slots, leaving, num_experts, load_LE=load_LE, max_moves=0)
    assert received(slots, must) == stranded
    assert received(slots, target) <= stranded + (max_moves if known else 0)
    before, after = peaks(load, must[:, staying]), peaks(load, target[:, staying])
    assert (after <= before * (1 + 1e-6)).all(), "moves are spent on balance"


def peaks(load: np.ndarray, slots: SlotsLRS) -> np.ndarray:
    """Largest rank load of each layer with the best split."""
    fractions = split.best_fractions(load, slots, np.ones(slots.shape[1]))
    return rank_loads(slots, fractions, load).max(axis=1)


def test_an_evacuation_balances_what_it_moves() -> None:
    slots = np.array([[[0, 4, -1], [1, -1, -1], [2, 3, -1]]], dtype=np.int32)
    load = np.array([[8.0, 2.0, 6.0, 1.0, 1.0]])
    target = membership.evacuate(slots, [2], 5, load_LE=load)
    assert peaks(load, target[:, :2]).tolist() == [9.0]


def test_ranks_survive_a_loss_if_the_others_have_room() -> None:
    slots = np.full((1, 3, 2), -1, dtype=np.int32)
    assert membership.survives_rank_loss(slots, 4)
    assert not membership.survives_rank_loss(slots, 5)
    assert not membership.survives_rank_loss(slots, np.array([4, 5]))
    assert not membership.survives_rank_loss(slots[:, :1], 1)
