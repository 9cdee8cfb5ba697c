"""Full plans with an even split: valid always, near the bound on every shape, fresh seeds too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import greedy_hierarchical, placement_loads
from moe_placement.bound import gap, lower_bound
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.even import full_even
from moe_placement.even.full_even_counts import capped, finest
from moe_placement.even.full_even_deal import deal, fewest
from moe_placement.even.full_even_exchange import exchange
from moe_placement.even.full_even_pairs import folded, refined
from moe_placement.placement import Placement, copies, faults
from moe_placement.score import rank_loads
from tests.support.planning_problems import Problem, problems

FREE = CopyLimits()


def planned(
    load: np.ndarray, slots: np.ndarray, speeds: np.ndarray, limits: CopyLimits = FREE
) -> tuple[np.ndarray, np.ndarray]:
    """(the plan, found valid, and its largest load ÷ speed [L])."""
    before = load.copy()
    slots_LRS = full_even.plan(load, slots, speeds, limits)
    assert np.array_equal(load, before), "the input is left alone"
    assert slots_LRS.dtype == np.int32
    assert slots_LRS.shape == (len(load), len(slots), slots.max())
    placement = Placement.even(slots_LRS)
    capacity = Capacity.of(slots.tolist(), speeds=speeds.tolist())
    assert list(faults(placement, np.full(len(load), load.shape[1]), capacity)) == []
    counts_LE = copies(slots_LRS, load.shape[1])
    assert counts_LE.min() >= limits.within_reach(load.shape[1], slots).min_copies
    assert counts_LE.max() <= limits.most(len(slots))
    loads_LR = rank_loads(slots_LRS, placement.fractions_LRS, load)
    return slots_LRS, (loads_LR / speeds).max(axis=1)


def alike(num_ranks: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(num_ranks, slots), np.ones(num_ranks)


@settings(deadline=None, max_examples=80)
@given(problems(present=False, closed=False, ragged=False), st.integers(1, 4), st.integers(0, 4))
def test_every_plan_is_valid(problem: Problem, min_copies: int, more: int) -> None:
    limits = CopyLimits(min_copies, min_copies + more if more else None)
    limits = limits.within_reach(problem.load_LE.shape[1], problem.capacity.slots_R)
    planned(problem.load_LE, problem.capacity.slots_R, problem.capacity.speeds_R, limits)


@settings(deadline=None, max_examples=25)
@given(problems(present=False, closed=False, ragged=False))
def test_twice_the_load_is_the_same_plan(problem: Problem) -> None:
    slots, speeds = problem.capacity.slots_R, problem.capacity.speeds_R
    once, _ = planned(problem.load_LE, slots, speeds)
    twice, _ = planned(problem.load_LE * 2, slots, speeds)
    assert np.array_equal(once, twice)


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 40),
    st.sampled_from(placement_loads.LOADS), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_never_worse_than_the_published_greedy_method(
    num_ranks: int, per_rank: int, num_experts: int, kind: str, seed: int
) -> None:
    """Where that puts no expert twice on a rank, which splits what cannot be split."""
    num_experts = min(num_experts, num_ranks * per_rank)
    load = placement_loads.draw_load(2, num_experts, kind, np.random.default_rng(seed))
    _, level_L = planned(load, *alike(num_ranks, per_rank))
    greedy = greedy_hierarchical.plan(load, num_ranks * per_rank, num_ranks)
    ordered = np.sort(greedy, axis=2)
    legal_L = (ordered[:, :, 1:] != ordered[:, :, :-1]).all(axis=(1, 2))
    greedy_L = placement_loads.rank_load(greedy, load).max(axis=1)
    assert (level_L <= greedy_L * (1 + 1e-9))[legal_L].all()


@pytest.mark.parametrize("kind", placement_loads.LOADS)
@pytest.mark.parametrize("shape_key", ["b", "c1", "c2", "c3", "d"])
def test_known_shapes_come_close_to_the_bound(shape_key: str, kind: str) -> None:
    """Far below the goals (0.5 % on average, 3 % at worst; zipf1.4 3 %), with seeds of its own."""
    shape = placement_loads.SHAPES[shape_key]
    load = placement_loads.make_load(shape_key, kind, salt=23)[:12]
    slots_LRS, _ = planned(load, *alike(shape.ranks, shape.slots // shape.ranks))
    gap_L = placement_loads.gap(slots_LRS, load)
    assert gap_L.mean() <= 0.004
    assert gap_L.max() <= 0.015


@pytest.mark.parametrize("kind", placement_loads.LOADS)
@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "per_rank", "mean", "worst"),
    [(61, 13, 7, 0.003, 0.005), (97, 31, 5, 0.006, 0.015), (64, 32, 3, 0.025, 0.05)],
)
def test_other_shapes_do_as_well(
    num_experts: int, num_ranks: int, per_rank: int, mean: float, worst: float, kind: str
) -> None:
    """Primes, and three slots a rank, where there is less to choose from."""
    rng = np.random.default_rng([5, num_experts])
    load = placement_loads.draw_load(6, num_experts, kind, rng)
    slots_LRS, _ = planned(load, *alike(num_ranks, per_rank))
    gap_L = placement_loads.gap(slots_LRS, load)
    assert gap_L.mean() <= mean
    assert gap_L.max() <= worst


def test_pairs_on_very_many_ranks_come_close_to_the_bound() -> None:
    """1024 experts on 1024 ranks of two slots: copies are halves of ranks."""
    shape = placement_loads.SHAPES["e"]
    for kind in ("zipf1.0", "lognorm1.0"):
        load = placement_loads.make_load("e", kind, salt=23)[:2]
        slots_LRS, _ = planned(load, *alike(shape.ranks, 2))
        assert placement_loads.gap(slots_LRS, load).max() <= 0.06


def test_slow_ranks_get_less() -> None:
    load = placement_loads.make_load("b", "lognorm1.0", salt=23)[:6]
    slots, speeds = np.full(32, 5), np.where(np.arange(32) % 4 == 0, 0.7, 1.0)
    _, level_L = planned(load, slots, speeds)
    assert (level_L <= load.sum(axis=1) / speeds.sum() * 1.01).all()


def test_ranks_may_have_unequal_slots() -> None:
    load = placement_loads.make_load("b", "zipf1.0", salt=23)[:6]
    slots, speeds = np.where(np.arange(32) % 3 == 0, 7, 5), np.ones(32)
    slots[4] = 0
    _, level_L = planned(load, slots, speeds)
    assert (level_L <= lower_bound(load, slots, speeds) * 1.02).all()


def test_a_hot_expert_is_on_every_rank() -> None:
    load = np.array([[1000.0, 1, 1, 1, 1, 1, 1, 1]])
    slots_LRS, level_L = planned(load, *alike(4, 3))
    assert ((slots_LRS == 0).sum(axis=2) == 1).all()
    assert level_L[0] <= 252


def test_equal_experts_are_dealt_evenly() -> None:
    _, level_L = planned(np.full((1, 12), 5.0), *alike(4, 4))
    assert level_L[0] == 15


def test_one_rank_holds_everything() -> None:
    slots_LRS, level_L = planned(np.array([[3.0, 2.0, 1.0]]), *alike(1, 5))
    assert slots_LRS.tolist() == [[[0, 1, 2, -1, -1]]]
    assert level_L[0] == 6


def test_more_ranks_than_experts() -> None:
    _, level_L = planned(np.array([[6.0, 3.0]]), *alike(9, 1))
    assert level_L[0] == 1


def test_no_slot_to_spare() -> None:
    slots_LRS, level_L = planned(np.array([[4.0, 3.0, 2.0, 1.0]]), *alike(2, 2))
    assert sorted(slots_LRS.ravel().tolist()) == [0, 1, 2, 3]
    assert level_L[0] == 5


def test_a_layer_without_load_holds_one_copy_each() -> None:
    load = np.array([[0.0] * 5, [9.0, 1, 1, 1, 0]])
    slots_LRS, _ = planned(load, *alike(3, 3))
    assert copies(slots_LRS, 5)[0].tolist() == [1] * 5


def test_copies_asked_for_are_there_even_where_ranks_are_few() -> None:
    """Two ranks of one slot and one of five hold two copies of only two experts."""
    slots, speeds = np.array([1, 1, 5]), np.ones(3)
    slots_LRS, _ = planned(np.array([[5.0, 1.0]]), slots, speeds, CopyLimits(min_copies=2))
    assert copies(slots_LRS, 2).tolist() == [[2, 2]]


def test_free_slots_beside_hot_copies() -> None:
    """With steep loads fewer, larger copies pack better than all that would fit."""
    load = placement_loads.make_load("b", "zipf1.4", salt=23)[:4]
    slots_LRS, level_L = planned(load, *alike(32, 5))
    assert (slots_LRS < 0).any()
    finest_LRS = deal(load, finest(load, np.full(32, 5), FREE), *alike(32, 5), FREE, in_rounds=True)
    all_filled = placement_loads.rank_load(finest_LRS, load).max(axis=1)
    assert (level_L < all_filled * 0.9).all()


def test_finest_numbers_make_the_largest_share_smallest() -> None:
    load = np.array([[9.0, 4.0, 1.0]])
    assert finest(load, np.full(3, 2), FREE).tolist() == [[3, 2, 1]]
    assert finest(load, np.full(3, 2), CopyLimits(max_copies=2)).tolist() == [[2, 2, 2]]
    assert finest(np.full((1, 3), 5.0), np.full(2, 2), FREE).tolist() == [[2, 1, 1]]
    assert capped(load, np.array([3.0]), 1, 3).tolist() == [[3, 2, 1]]
    assert capped(load, np.array([3.0]), 2, 2).tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("in_rounds", [True, False])
def test_an_expert_dealt_in_two_rounds_does_not_meet_itself(in_rounds: bool) -> None:
    load, counts = np.array([[8.0, 6.0, 0.5]]), np.array([[2, 3, 1]])
    slots_LRS = deal(load, counts, *alike(3, 2), FREE, in_rounds=in_rounds)
    assert copies(slots_LRS, 3).tolist() == [[2, 3, 1]]
    assert list(faults(Placement.even(slots_LRS), np.array([3]), Capacity.of(2, 3))) == []


def test_the_fewest_copies_find_a_place_where_there_is_one() -> None:
    slots_RS = fewest(3, 2, np.array([3, 2, 1]))
    assert copies(slots_RS[None], 3).tolist() == [[2, 2, 2]]
    assert ((slots_RS >= 0).sum(axis=1) == [3, 2, 1]).all()


@settings(deadline=None, max_examples=60)
@given(problems(present=True, closed=False, ragged=False))
def test_swapping_raises_no_peak_and_changes_no_number(problem: Problem) -> None:
    assert problem.current is not None
    load, slots_R, speeds = problem.load_LE, problem.capacity.slots_R, problem.capacity.speeds_R
    # Spare slots, which swaps do not use, are left out.
    slots = -np.sort(-problem.current.slots_LRS, axis=2)[:, :, : int(slots_R.max())]
    before = Placement.even(slots.copy())
    filled = slots >= 0
    token = np.where(filled, np.take_along_axis(load[:, None], np.maximum(slots, 0), 2), 0.0)
    token *= before.fractions_LRS
    level_L = lower_bound(load, slots_R, speeds)
    exchange(slots, token, slots_R, speeds, level_L, 0.0)
    after = Placement.even(slots)
    capacity = Capacity.of(slots_R.tolist())
    assert list(faults(after, np.full(len(load), load.shape[1]), capacity)) == []
    num_experts = load.shape[1]
    assert np.array_equal(copies(slots, num_experts), copies(before.slots_LRS, num_experts))
    then, now = (rank_loads(p.slots_LRS, p.fractions_LRS, load) for p in (before, after))
    assert np.allclose(token.sum(axis=2), now)
    assert (gap(now, speeds, level_L) <= gap(then, speeds, level_L) + 1e-9).all()


def test_pairs_are_folded_and_refined() -> None:
    load = np.array([[4.0, 3.0, 2.0, 1.0]])
    counts = np.ones((1, 4), dtype=np.int64)
    assert folded(load, counts, 2).tolist() == [5.0]
    assert folded(load, counts * 2, 3).tolist() == [np.inf]
    load = placement_loads.draw_load(8, 48, "lognorm1.0", np.random.default_rng(23))
    level_L = lower_bound(load, *alike(32, 2))
    counts = finest(load, np.full(32, 2), FREE)
    better = refined(load, counts, 32, level_L, 1, 32)
    assert (better.sum(axis=1) <= 64).all()
    before_L, after_L = (folded(load, number, 32) / level_L - 1 for number in (counts, better))
    assert (after_L <= before_L).all()
    assert after_L.mean() <= before_L.mean() * 0.75
