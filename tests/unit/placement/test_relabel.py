"""A new plan keeps its balance and lands where most of it already lies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.plan import SlotsLRS, even_fractions
from moe_placement.placement import Placement, holders, received
from moe_placement.step.relabel import relabel


def slots(*ranks: list[int]) -> SlotsLRS:
    """One layer."""
    return np.array([ranks], dtype=np.int32)


def alike(num_ranks: int, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Speeds, slots and domains of ranks that are all alike."""
    return np.ones(num_ranks), np.full(num_ranks, num_slots), np.zeros(num_ranks, dtype=np.int64)


def random_placement(rng: np.random.Generator, slots_R: np.ndarray, num_experts: int) -> Placement:
    placed = np.full((2, len(slots_R), int(slots_R.max())), -1, dtype=np.int32)
    for layer, (rank, num_slots) in itertools.product(range(2), enumerate(slots_R.tolist())):
        filled = int(rng.integers(0, num_slots + 1))
        placed[layer, rank, :filled] = rng.permutation(num_experts)[:filled]
    fractions = np.where(placed >= 0, rng.random(placed.shape), 0.0)
    return Placement(placed, fractions)


def test_exchanged_ranks_are_put_back_and_nothing_moves() -> None:
    current = slots([4, 0, 1], [2, 3, -1], [0, 5, 2])
    target = Placement.even(slots([2, 3, -1], [0, 2, 5], [0, 1, 4]))
    again = relabel(target, current, *alike(3, 3))
    assert np.array_equal(again.slots_LRS, current), "in the very slots"
    assert np.array_equal(again.fractions_LRS, even_fractions(current))


def test_arrivals_take_the_lowest_free_slots() -> None:
    current = slots([-1, 3, -1, 1])
    target = Placement.even(slots([0, 1, 2, -1]))
    again = relabel(target, current, *alike(1, 4))
    assert again.slots_LRS.tolist() == [[[0, 2, -1, 1]]]


def test_only_ranks_alike_in_slots_and_speed_change_places() -> None:
    current = slots([0, 1, -1], [2, 3, -1])
    target = Placement.even(slots([2, 3, -1], [0, 1, -1]))
    ranks = (np.ones(2), np.array([2, 3]), np.zeros(2, dtype=np.int64))
    assert received(current, relabel(target, current, *ranks).slots_LRS) == 4
    ranks = (np.array([1.0, 0.7]), np.array([3, 3]), np.zeros(2, dtype=np.int64))
    assert received(current, relabel(target, current, *ranks).slots_LRS) == 4


@pytest.mark.parametrize(("domains", "on_1", "on_3"), [([0, 0, 1, 1], 5, 7), ([0, 1, 1, 0], 7, 5)])
def test_what_is_received_anyway_comes_from_the_own_domain_if_it_can(
    domains: list[int], on_1: int, on_3: int
) -> None:
    current = slots([0, 5], [1, 6], [2, 7], [3, 8])
    # Ranks 1 and 3 keep nothing of the new plan and get the two contents that are left.
    target = Placement.even(slots([0, 5], [7, -1], [2, 7], [5, -1]))
    again = relabel(target, current, np.ones(4), np.full(4, 2), np.array(domains))
    assert again.slots_LRS.tolist() == [[[0, 5], [on_1, -1], [2, 7], [on_3, -1]]]


def test_contents_made_for_a_domain_stay_in_it() -> None:
    current = slots([0], [1], [2], [3])
    target = Placement.even(slots([2], [0], [1], [3]))
    ranks = (np.ones(4), np.full(4, 1), np.array([0, 0, 1, 1]))
    free = relabel(target, current, *ranks)
    kept = relabel(target, current, *ranks, within_domains=True)
    assert received(current, free.slots_LRS) == 0
    assert sorted(kept.slots_LRS[0, :2].ravel().tolist()) == [0, 2]
    assert received(current, kept.slots_LRS) == 2


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_permutation_of_alike_ranks_with_the_fewest_received(
    num_ranks: int, num_experts: int, within_domains: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    slots_R = rng.integers(1, 1 + min(2, num_experts), num_ranks)
    speeds_R, domains_R = rng.choice([0.7, 1.0], num_ranks), rng.integers(0, 2, num_ranks)
    current = random_placement(rng, slots_R, num_experts)
    target = random_placement(rng, slots_R, num_experts)
    again = relabel(
        target, current.slots_LRS, speeds_R, slots_R, domains_R, within_domains=within_domains
    )

    def legal(order: tuple[int, ...]) -> bool:
        to = list(order)
        same = (slots_R[to] == slots_R) & (speeds_R[to] == speeds_R)
        return bool((same & (~within_domains | (domains_R[to] == domains_R))).all())

    orders = [list(o) for o in itertools.permutations(range(num_ranks)) if legal(o)]
    for layer in range(2):
        now = current.slots_LRS[layer][None]
        options = [target.slots_LRS[layer][order][None] for order in orders]
        fewest = min(received(now, option) for option in options)
        assert received(now, again.slots_LRS[layer][None]) == fewest
        shares = [_shares(target, layer, order) for order in orders]
        assert _shares(again, layer, list(range(num_ranks))) in shares, "fractions go along"
    held = holders(current.slots_LRS, num_experts) & holders(again.slots_LRS, num_experts)
    for layer, rank, expert in np.argwhere(held).tolist():
        slot = current.slots_LRS[layer, rank].tolist().index(expert)
        assert again.slots_LRS[layer, rank, slot] == expert, "who stays keeps its slot"


def _shares(placement: Placement, layer: int, order: list[int]) -> list[dict[int, float]]:
    return [
        {
            expert: share
            for expert, share in zip(
                placement.slots_LRS[layer, rank].tolist(),
                placement.fractions_LRS[layer, rank].tolist(),
                strict=True,
            )
            if expert >= 0
        }
        for rank in order
    ]


@pytest.mark.parametrize("num_ranks", [40])
def test_many_ranks_in_shuffled_order_are_recognised(num_ranks: int) -> None:
    rng = np.random.default_rng(11)
    experts = rng.permutation(num_ranks * 3).reshape(1, num_ranks, 3).astype(np.int32)
    target = Placement.even(experts[:, rng.permutation(num_ranks)])
    assert received(experts, relabel(target, experts, *alike(num_ranks, 3)).slots_LRS) == 0
