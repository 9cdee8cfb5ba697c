"""Moves between two placements and who gives the weights; placements when ranks come and go."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.deployment import slots_per_rank
from moe_api.plan import SlotsLRS
from moe_api.serving import Experts
from moe_placement import initial
from moe_placement.capacity import Capacity, FlagsR
from moe_placement.placement import Placement
from moe_placement.planner import plan
from moe_placement.walk import membership, migration
from moe_placement.walk.migration import diff, reached


def assert_complete(slots: SlotsLRS, num_experts: int) -> None:
    for layer in slots:
        assert set(layer[layer >= 0].tolist()) == set(range(num_experts))
        for row in layer:
            filled = row[row >= 0].tolist()
            assert len(filled) == len(set(filled)), "an expert twice on one rank"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[SlotsLRS, SlotsLRS, list[list[str]], FlagsR]:
    """Any two placements of some ranks, in zones and hosts, some of which cannot give."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, num_ranks, num_slots, num_experts = (int(rng.integers(1, n)) for n in (4, 9, 5, 12))
    old, new = (
        np.array(
            [[rng.permutation(max(num_experts, num_slots))[:num_slots] for _ in range(num_ranks)]
             for _ in range(layers)]
        )
        for _ in range(2)
    )  # fmt: skip
    old[rng.random(old.shape) < 0.3] = -1
    new[rng.random(new.shape) < 0.3] = -1
    zones = rng.integers(0, 2, num_ranks)
    hosts = [f"{zone}-{rng.integers(0, 2)}" for zone in zones]
    domains = [[str(zone), host] for zone, host in zip(zones, hosts, strict=True)]
    return old.astype(np.int32), new.astype(np.int32), domains, rng.random(num_ranks) < 0.9


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_the_moves_make_new_out_of_old_from_the_nearest_that_gives_least(
    pair: tuple[SlotsLRS, SlotsLRS, list[list[str]], FlagsR],
) -> None:
    old, new, domains, live = pair
    moves = diff(old, new, domains, live_R=live)
    made = np.where(new < 0, -1, old)
    for move in moves:
        assert made[move.layer, move.rank, move.slot] != move.expert
        made[move.layer, move.rank, move.slot] = move.expert
    assert np.array_equal(made, new)
    assert moves == sorted(moves, key=lambda m: (m.layer, m.rank, m.slot))
    by_rank = [m for r in range(len(domains)) for m in diff(old, new, domains, rank=r, live_R=live)]
    assert sorted(moves, key=lambda m: m.rank) == by_rank, "a rank derives its own part alone"
    gives = Counter((m.layer, m.sources[0][0]) for m in moves
                    if m.sources and m.sources[0][0] != m.rank)  # fmt: skip
    for move in moves:
        holders = [(int(r), int(s)) for r, s in np.argwhere(old[move.layer] == move.expert)]
        assert sorted(move.sources) == sorted(h for h in holders if live[h[0]])
        distances = [distance(domains, move.rank, rank) for rank, _ in move.sources]
        assert distances == sorted(distances)
        for (rank, _), far in zip(move.sources, distances, strict=True):
            giver = move.sources[0][0]
            if far == distances[0] > 0 and rank != giver:
                assert gives[move.layer, giver] <= gives[move.layer, rank] + 1


def distance(domains: list[list[str]], mine: int, theirs: int) -> int:
    if mine == theirs:
        return 0
    return 3 - sum(a == b for a, b in zip(domains[mine], domains[theirs], strict=True))


def test_sources_prefer_the_same_domain() -> None:
    old = np.array([[[0, -1], [0, -1], [1, -1]]], dtype=np.int32)
    new = np.array([[[0, -1], [0, -1], [1, 0]]], dtype=np.int32)
    near_one = [["a"], ["b"], ["b"]]
    assert diff(old, new, near_one)[0].sources[0][0] == 1
    assert diff(old, new)[0].sources == ((0, 0), (1, 0))


def test_two_receivers_ask_two_holders() -> None:
    """Rank 1 is the only holder of expert 1, so expert 0 comes from rank 0."""
    old = np.array([[[0, -1], [0, 1], [-1, -1], [-1, -1]]], dtype=np.int32)
    new = np.array([[[0, -1], [0, 1], [0, -1], [1, -1]]], dtype=np.int32)
    assert [m.sources[0][0] for m in diff(old, new)] == [0, 1]
    assert [m.sources[0][0] for m in diff(old, new, rank=2)] == [0], "the same on every rank"


def test_placements_of_other_ranks_have_no_moves_between_them() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\) layers"):
        diff(np.zeros((1, 2, 2), dtype=np.int32), np.zeros((1, 3, 2), dtype=np.int32))


def test_what_a_rank_holds_is_reached_in_whichever_slots_and_however_many() -> None:
    here = np.array([[[0, -1, 2], [1, -1, -1]]], dtype=np.int32)
    there = np.array([[[2, 0], [-1, 1]]], dtype=np.int32)
    assert reached(here, there)
    assert not reached(here, there[:, ::-1])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000))
def test_a09_without_redundant_slots_a_plan_is_a_permutation(seed: int) -> None:
    """No redundant slot means one copy of each expert, not "off", whatever the room to move."""
    load = np.random.default_rng(seed).lognormal(4, 1.5, (2, 12))
    serving = slots_per_rank(Experts(redundant_slots_per_rank=0), 12, 3)
    current = Placement.even(initial.contiguous(2, 12, 3, serving + 2))
    target = plan(load, Capacity.of(serving, 3), None, current).placement.slots_LRS
    for layer in target:
        assert sorted(layer[layer >= 0].tolist()) == list(range(12))
        assert ((layer >= 0).sum(axis=1) == serving).all()


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


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_redundant_copies_make_room_for_what_a_lost_rank_held(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(2, 5)), int(rng.integers(1, 11))
    slots = -(-num_experts // num_ranks) + int(rng.integers(1, 4))
    load = np.round(rng.lognormal(6, 1.5, (2, num_experts)))
    full = plan(load, Capacity.of(slots, num_ranks)).placement.slots_LRS
    if not membership.survives_rank_loss(full, num_experts):
        return
    lost = int(rng.integers(num_ranks))
    survivors = [rank for rank in range(num_ranks) if rank != lost]
    assert_complete(membership.repair(full, survivors, num_experts), num_experts)


def test_newcomer_relieves_ranks_over_their_serving_slots() -> None:
    repaired = np.array([[[0, 1, 2, 6], [3, 4, 5, 7]]], dtype=np.int32)
    admitted = membership.admit(repaired, [0, 1, None], 8, serving_slots=3)
    assert_complete(admitted, 8)
    assert ((admitted >= 0).sum(axis=2)[0, :2] == 3).all()
