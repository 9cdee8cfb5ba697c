"""The exact search: as good as trying everything, and it says when it has not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import placement_loads
from bench.exact_pairs import best_even_level
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.even import exact_even
from moe_placement.even.exact_even_pack import Packing, Stopped
from moe_placement.even.full_even_heap import least_heap
from moe_placement.placement import Placement, copies, faults
from moe_placement.score import rank_loads


def level(slots_LRS: np.ndarray, load: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    placement = Placement.even(slots_LRS)
    return (rank_loads(slots_LRS, placement.fractions_LRS, load) / speeds).max(axis=1)


def all_placements(num_experts: int, slots: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every choice of experts for every rank."""
    yield from product(
        *(
            [held for n in range(room + 1) for held in combinations(range(num_experts), n)]
            for room in slots
        )
    )


def best_level(load_E: np.ndarray, slots: list[int], speeds: np.ndarray, most: int) -> float:
    best = np.inf
    for ranks in all_placements(len(load_E), slots):
        counts = np.bincount([e for held in ranks for e in held], minlength=len(load_E))
        if counts.min() >= 1 and counts.max() <= most:
            share = load_E / counts
            loads = np.array([sum(share[e] for e in held) for held in ranks])
            best = min(best, float((loads / speeds).max()))
    return best


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_as_good_as_trying_everything(data: st.DataObject) -> None:
    """Ranks of unequal slots and speeds too, and copies limited."""
    num_experts = data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if sum(min(room, num_experts) for room in slots) < num_experts:
        slots = [num_experts, *slots[1:]]
    speeds = np.array([data.draw(st.sampled_from([1.0, 1.0, 0.7, 2.0])) for _ in slots])
    most = data.draw(st.integers(1, 3))
    load = np.array([[data.draw(st.integers(0, 50)) for _ in range(num_experts)]], dtype=float)
    exact = exact_even.plan(load, np.array(slots), speeds, CopyLimits(max_copies=most))
    capacity = Capacity.of(slots, speeds=speeds)
    assert list(faults(Placement.even(exact.slots_LRS), np.array([num_experts]), capacity)) == []
    assert copies(exact.slots_LRS, num_experts).max() <= most
    assert exact.proven_L.all()
    expected = best_level(load[0], slots, speeds, min(most, len(slots)))
    assert level(exact.slots_LRS, load, speeds)[0] == pytest.approx(expected)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 7), st.integers(2, 6), st.sampled_from(placement_loads.LOADS),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_as_good_as_enumerated_pairs(
    num_experts: int, num_ranks: int, kind: str, seed: int
) -> None:
    num_experts = min(num_experts, 2 * num_ranks)
    load = placement_loads.draw_load(1, num_experts, kind, np.random.default_rng(seed))
    speeds = np.ones(num_ranks)
    exact = exact_even.plan(load, np.full(num_ranks, 2), speeds, CopyLimits())
    expected = best_even_level(load[0], num_ranks)
    assert level(exact.slots_LRS, load, speeds)[0] == pytest.approx(expected)
    assert exact.proven_L.all()


@pytest.mark.parametrize("kind", placement_loads.LOADS)
def test_eight_experts_on_eight_ranks_are_proven(kind: str) -> None:
    """Mixtral's shape: every layer within the work allowed, 2.5 to 4 % above the mean."""
    load = placement_loads.make_load("a", kind, salt=23)
    speeds = np.ones(8)
    exact = exact_even.plan(load, np.full(8, 2), speeds, CopyLimits())
    assert exact.proven_L.all()
    gap_L = placement_loads.gap(exact.slots_LRS, load)
    assert 0.02 <= gap_L.mean() <= 0.045
    for layer in range(0, 32, 8):
        expected = best_even_level(load[layer], 8)
        assert level(exact.slots_LRS, load, speeds)[layer] == pytest.approx(expected)


def test_says_when_it_stopped() -> None:
    load = placement_loads.draw_load(1, 16, "lognorm1.0", np.random.default_rng(1))
    exact = exact_even.plan(load, np.full(16, 2), np.ones(16), CopyLimits())
    assert not exact.proven_L.any()
    capacity = Capacity.of(2, 16)
    assert list(faults(Placement.even(exact.slots_LRS), np.array([16]), capacity)) == []


def test_says_when_its_work_was_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    load = placement_loads.make_load("a", "zipf1.0", salt=23)[:4]
    monkeypatch.setattr(exact_even, "MAX_WORK", 20)
    exact = exact_even.plan(load, np.full(8, 2), np.ones(8), CopyLimits())
    assert not exact.proven_L.any()


def test_keeps_a_plan_that_is_the_best() -> None:
    load, speeds = np.array([[2.0, 1.0, 1.0]]), np.ones(2)
    known = np.array([[[2, 1], [0, -1]]], dtype=np.int32)
    exact = exact_even.plan(load, np.full(2, 2), speeds, CopyLimits(), known)
    assert np.array_equal(exact.slots_LRS, known)
    assert exact.proven_L.all()


def test_needs_free_slots_at_times() -> None:
    """Two copies of the last expert fit a slot each, but one beside a free slot is better."""
    load, speeds = np.array([[6.0, 5.0, 1.0]]), np.ones(2)
    exact = exact_even.plan(load, np.full(2, 2), speeds, CopyLimits())
    assert level(exact.slots_LRS, load, speeds)[0] == 6


def test_packing_finds_the_only_way() -> None:
    packing = Packing([5.0, 4.0, 3.0, 2.0, 1.0], [2, 3], [1.0, 1.0], [1000])
    assert packing.places((1, 1, 1, 1, 1), 7.4) is None
    found = packing.places((1, 1, 1, 1, 1), 8.0)
    assert found is not None
    assert sorted(expert for held in found for expert in held) == [0, 1, 2, 3, 4]
    assert len(found[0]) == 2


def test_packing_puts_no_expert_twice_on_a_rank() -> None:
    packing = Packing([3.0, 1.0], [2, 2], [1.0, 1.0], [1000])
    assert packing.places((2, 1), 4.0) is not None
    assert packing.places((3, 1), 6.0) is None


def test_packing_stops() -> None:
    packing = Packing([1.0 + n / 100 for n in range(12)], [3] * 4, [1.0] * 4, [5])
    with pytest.raises(Stopped):
        packing.places((1,) * 12, 3.2)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_packing_beats_the_heap(data: st.DataObject) -> None:
    num_experts, slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    num_ranks = data.draw(st.integers(1, 3))
    load = np.array([data.draw(st.integers(1, 50)) for _ in range(num_experts)], dtype=float)
    for ranks in list(all_placements(num_experts, [slots] * num_ranks))[:: 1 + num_experts]:
        counts = np.bincount([e for held in ranks for e in held], minlength=num_experts)
        if counts.min() < 1:
            continue
        share = load / counts
        copies_C = np.sort(np.repeat(share, counts))[::-1]
        copies_C = np.pad(copies_C, (0, num_ranks * slots - len(copies_C)))
        peak = max(sum(share[e] for e in held) for held in ranks)
        assert least_heap(copies_C[None], num_ranks, slots)[0] <= peak * (1 + 1e-12)
        assert least_heap(copies_C[None], num_ranks, None)[0] <= peak * (1 + 1e-12)
