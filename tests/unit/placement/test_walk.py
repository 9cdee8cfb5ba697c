"""The promises of a plan and of every instant of the walk to it, for any load and any start."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.deployment import slots_per_rank
from moe_api.plan import SlotsLRS, even_fractions
from moe_api.serving import Experts
from moe_placement import greedy, initial, membership, migration, score, waves


@st.composite
def cases(draw: st.DrawFn) -> tuple[SlotsLRS, np.ndarray, int, int]:
    """(placement in force, load, serving slots, experts)."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 10))
    layers = draw(st.integers(1, 3))
    serving = -(-num_experts // num_ranks) + draw(st.integers(0, 2))
    spare = draw(st.integers(1, 2))
    slots = initial.contiguous(layers, num_experts, num_ranks, serving + spare)
    counts = st.lists(
        st.integers(0, 1000), min_size=layers * num_experts, max_size=layers * num_experts
    )
    load = np.asarray(draw(counts), dtype=np.float64).reshape(layers, num_experts)
    return slots, load, serving, num_experts


def assert_complete(slots: SlotsLRS, num_experts: int) -> None:
    for layer in slots:
        assert set(layer[layer >= 0].tolist()) == set(range(num_experts))
        for row in layer:
            filled = row[row >= 0].tolist()
            assert len(filled) == len(set(filled)), "an expert twice on one rank"


@settings(deadline=None, max_examples=150)
@given(cases())
def test_plan_is_complete_bounded_and_never_worse(
    case: tuple[SlotsLRS, np.ndarray, int, int],
) -> None:
    slots, load, serving, num_experts = case
    target = greedy.plan(load, slots, serving)
    assert_complete(target, num_experts)
    assert ((target >= 0).sum(axis=2) <= serving).all()
    before = score.rank_loads(slots, even_fractions(slots), load)
    after = score.rank_loads(target, even_fractions(target), load)
    assert (after.max(axis=1) <= before.max(axis=1) + 1e-6).all()
    assert np.allclose(after.sum(axis=1), load.sum(axis=1))
    assert np.array_equal(target, greedy.plan(load, slots, serving)), "same input, same plan"


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000))
def test_a09_without_redundant_slots_a_plan_is_a_permutation(seed: int) -> None:
    """No redundant slot means one copy of each expert, not "off", whatever the room to move."""
    load = np.random.default_rng(seed).lognormal(4, 1.5, (2, 12))
    serving = slots_per_rank(Experts(redundant_slots_per_rank=0), 12, 3)
    slots = initial.contiguous(2, 12, 3, serving + 2)
    target = greedy.plan(load, slots, serving)
    for layer in target:
        assert sorted(layer[layer >= 0].tolist()) == list(range(12))
        assert ((layer >= 0).sum(axis=1) == serving).all()


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_epoch_of_the_walk_is_complete_and_the_walk_ends(
    case: tuple[SlotsLRS, np.ndarray, int, int],
) -> None:
    slots, load, serving, num_experts = case
    target = greedy.plan(load, slots, serving)
    current, num_waves = slots, 0
    while not migration.reached(current, target):
        wave = waves.next_wave(current, target, waves.Limits(max_moves=64))
        assert wave is not None, "a spare slot always lets a walk go on"
        assert_complete(wave, num_experts)
        moves = migration.diff(current, wave)
        for move in moves:
            assert current[move.layer, move.rank, move.slot] == -1, "arrivals take free slots only"
            assert move.sources, "some rank holds it"
            for rank, slot in move.sources:
                assert current[move.layer, rank, slot] == move.expert
        per_rank = [(m.layer, m.rank) for m in moves]
        assert len(per_rank) == len(set(per_rank)), "one arrival per rank, layer and wave"
        current, num_waves = wave, num_waves + 1
        assert num_waves < 200
    arrived = greedy.plan(load, current, serving)
    assert migration.reached(arrived, current), "unchanged load moves nothing"


def test_no_free_slot_is_said() -> None:
    current = initial.contiguous(1, 4, 2, 2)
    target = current[:, ::-1].copy()
    assert waves.next_wave(current, target) is None


def test_sources_prefer_the_same_domain() -> None:
    old = np.array([[[0, -1], [0, -1], [1, -1]]], dtype=np.int32)
    new = np.array([[[0, -1], [0, -1], [1, 0]]], dtype=np.int32)
    near_one = [["a"], ["b"], ["b"]]
    assert migration.diff(old, new, near_one)[0].sources[0][0] == 1
    assert migration.diff(old, new)[0].sources == ((0, 0), (1, 0))


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_load_that_is_no_count_is_refused(bad: float) -> None:
    slots = initial.contiguous(1, 2, 2, 2)
    with pytest.raises(ValueError, match=r"layer 0, expert 1"):
        greedy.plan(np.array([[1.0, bad]]), slots, 1)


def test_zero_load_keeps_the_placement() -> None:
    slots = initial.contiguous(2, 4, 2, 3)
    assert np.array_equal(greedy.plan(np.zeros((2, 4)), slots, 2), slots)


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 5), st.integers(1, 12), st.integers(0, 3), st.data())
def test_repair_covers_with_the_fewest_transfers_or_names_the_uncovered(
    num_ranks: int, num_experts: int, extra: int, data: st.DataObject
) -> None:
    num_slots = -(-num_experts // num_ranks) + extra
    slots = initial.contiguous(1, num_experts, num_ranks, num_slots)
    lost = data.draw(st.integers(0, num_ranks - 1))
    survivors = [r for r in range(num_ranks) if r != lost]
    if (num_ranks - 1) * num_slots < num_experts:
        with pytest.raises(initial.InsufficientSlots) as caught:
            membership.repair(slots, survivors, num_experts)
        assert len(caught.value.uncovered) == num_experts - (num_ranks - 1) * num_slots
        assert not membership.survives_rank_loss(slots, num_experts)
        return
    repaired = membership.repair(slots, survivors, num_experts)
    assert_complete(repaired, num_experts)
    for row, old in enumerate(survivors):
        kept = slots[:, old] >= 0
        assert (repaired[:, row][kept] == slots[:, old][kept]).all(), "survivors keep their slots"
    arrived = len(migration.diff(slots[:, survivors], repaired))
    assert arrived == int((slots[:, lost] >= 0).sum())
    back = membership.admit(repaired, [*range(len(survivors)), None], num_experts, num_slots)
    assert_complete(back, num_experts)
    assert (back[:, -1] >= 0).sum() >= num_experts // num_ranks


@settings(deadline=None, max_examples=150)
@given(cases(), st.data())
def test_redundant_copies_make_room_for_what_a_lost_rank_held(
    case: tuple[SlotsLRS, np.ndarray, int, int], data: st.DataObject
) -> None:
    slots, load, _, num_experts = case
    full = greedy.plan(load, slots, slots.shape[2])
    if not membership.survives_rank_loss(full, num_experts):
        return
    lost = data.draw(st.integers(0, full.shape[1] - 1))
    survivors = [rank for rank in range(full.shape[1]) if rank != lost]
    assert_complete(membership.repair(full, survivors, num_experts), num_experts)


def test_newcomer_relieves_ranks_over_their_serving_slots() -> None:
    repaired = np.array([[[0, 1, 2, 6], [3, 4, 5, 7]]], dtype=np.int32)
    admitted = membership.admit(repaired, [0, 1, None], 8, serving_slots=3)
    assert_complete(admitted, 8)
    assert ((admitted >= 0).sum(axis=2)[0, :2] == 3).all()
