"""The walk between any two placements: what every wave keeps, and how short the way is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import greedy_hierarchical
from bench.placement_loads import LOADS, SHAPES, drift, make_load
from moe_api.plan import SlotsLRS
from moe_placement.capacity import Capacity
from moe_placement.placement import copies, received
from moe_placement.walk import migration, waves
from moe_placement.walk.waves import Limits, WalkError
from tests.support.walk_judge import follow, held


def random_placement(
    rng: np.random.Generator, num_layers: int, num_experts: int, serving: list[int], width: int
) -> SlotsLRS:
    """Complete, never twice on a rank, with as many further copies as chance has it."""
    out = np.full((num_layers, len(serving), width), -1, dtype=np.int32)
    for layer in range(num_layers):
        on: list[set[int]] = [set() for _ in serving]
        for expert in rng.permutation(num_experts).tolist():
            roomy = [r for r, room in enumerate(serving) if len(on[r]) < room]
            on[roomy[int(rng.integers(len(roomy)))]].add(expert)
        for _ in range(int(rng.integers(0, sum(serving) - num_experts + 1))):
            rank = int(rng.integers(len(serving)))
            others = sorted(set(range(num_experts)) - on[rank])
            if others and len(on[rank]) < serving[rank]:
                on[rank].add(others[int(rng.integers(len(others)))])
        for rank, experts in enumerate(on):
            out[layer, rank, : len(experts)] = rng.permutation(sorted(experts))
    return out


@st.composite
def ways(draw: st.DrawFn) -> tuple[SlotsLRS, SlotsLRS, Limits]:
    """Any two placements: primes, one rank, more ranks than experts, no spare slot or some, ranks
    that are dead or leave, every bound."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_ranks, num_experts = int(rng.integers(1, 8)), int(rng.integers(1, 14))
    states = rng.permutation([0, *rng.choice(3, num_ranks - 1, p=[0.7, 0.15, 0.15])])
    open_R, live_R = states == 0, states != 2
    need, floor = -(-num_experts // int(open_R.sum())), -(-num_experts // num_ranks)
    slots_R = need + rng.integers(0, int(rng.integers(1, 4)), num_ranks)
    before = rng.integers(floor, slots_R + 1)
    after = np.where(open_R, rng.integers(need, slots_R + 1), 0)
    layers, width = int(rng.integers(1, 4)), int(slots_R.max())
    limits = Limits(
        max_moves=rng.choice([None, None, 1, 3]),
        bytes_per_expert=10,
        max_rank_bytes=rng.choice([None, None, 10, 25]),
        max_link_bytes=rng.choice([None, None, 10, 25]),
        live_R=live_R,
        open_R=open_R,
        slots_R=slots_R,
        domains_R=rng.integers(0, 3, num_ranks),
    )
    current = random_placement(rng, layers, num_experts, before.tolist(), width)
    return current, random_placement(rng, layers, num_experts, after.tolist(), width), limits


@settings(deadline=None, max_examples=150)
@given(ways())
def test_every_wave_of_every_walk(way: tuple[SlotsLRS, SlotsLRS, Limits]) -> None:
    current, target, limits = way
    steps = follow(current, target, limits)
    for old, new in zip(waves.walk(current, target, limits), steps, strict=True):
        assert np.array_equal(old, new), "the walk is its waves, and the same again"


@settings(deadline=None, max_examples=60)
@given(ways())
def test_with_spare_slots_and_no_bound_nothing_moves_twice_or_late(
    way: tuple[SlotsLRS, SlotsLRS, Limits],
) -> None:
    """With free slots enough no copy is parked, and every rank receives in every wave."""
    current, target, limits = way
    wide = Limits(live_R=limits.live_R, open_R=limits.open_R)
    roomy = np.pad(current, ((0, 0), (0, 0), (0, current.shape[2] + 1)), constant_values=-1)
    steps = follow(roomy, target, wide)
    transfers = sum(received(a, b) for a, b in zip([roomy, *steps], steps, strict=False))
    here = np.where(limits.live_R[:, None], roomy, -1)
    wanted = [
        max((len(w - h) for h, w in zip(held(here[la]), held(target[la]), strict=True)), default=0)
        for la in range(len(target))
    ]
    assert transfers == received(here, np.pad(target, ((0, 0), (0, 0), (0, 1)), constant_values=-1))
    assert len(steps) <= max(wanted) + 1


def rows(*ranks: list[int]) -> SlotsLRS:
    return np.array([ranks], dtype=np.int32)


def test_a_cycle_of_single_copies_goes_through_the_one_free_slot() -> None:
    current, target = rows([0], [1], [-1]), rows([1], [0], [-1])
    steps = follow(current, target, Limits())
    assert [step.tolist() for step in steps] == [
        [[[-1], [1], [0]]],
        [[[1], [-1], [0]]],
        [[[1], [0], [-1]]],
    ]


def test_two_cycles_share_the_free_slots_they_find() -> None:
    current = rows([0], [1], [2], [3], [-1], [-1])
    target = rows([1], [0], [3], [2], [-1], [-1])
    assert len(follow(current, target, Limits())) == 3


def test_without_a_free_slot_a_second_copy_makes_room_and_comes_back() -> None:
    current, target = rows([0], [1], [2], [2]), rows([1], [0], [2], [2])
    steps = follow(current, target, Limits())
    assert migration.reached(steps[-1], target)
    assert len(steps) == 5


def test_nothing_is_parked_on_a_rank_that_leaves() -> None:
    current, target = rows([0], [1], [-1]), rows([1], [0], [-1])
    limits = Limits(open_R=np.array([True, True, False]))
    assert waves.next_wave(current, target, limits) is None


def test_without_a_free_slot_or_a_second_copy_nothing_moves() -> None:
    current = rows([0, 1], [2, 3])
    assert waves.next_wave(current, current[:, ::-1].copy()) is None
    assert waves.walk(current, current) == ()


def test_slots_that_neither_placement_shows_are_used_when_the_limits_name_them() -> None:
    current = rows([0, 1], [2, 3])
    target = current[:, ::-1].copy()
    limits = Limits(slots_R=np.array([3, 2]))
    steps = waves.walk(current, target, limits)
    assert steps[-1].shape == (1, 2, 3)
    assert migration.reached(steps[-1], target)


def test_an_expert_that_is_only_on_leaving_ranks_comes_first() -> None:
    current = rows([0, 1, -1], [2, 3, -1], [4, 5, -1])
    target = rows([0, 1, 4], [2, 3, 5], [-1, -1, -1])
    other = rows([0, 1, 2], [3, 4, 5], [-1, -1, -1])
    limits = Limits(max_moves=1, open_R=np.array([True, True, False]))
    for goal in (target, other):
        first = waves.next_wave(current, goal, limits)
        assert first is not None
        assert {m.expert for m in migration.diff(current, first)} <= {4, 5}


def test_a07_nothing_is_asked_of_or_sent_to_a_dead_rank() -> None:
    capacity = Capacity.of(4, 4, dead=[2])
    current = rows([0, 1, 2, -1], [3, 4, 5, -1], [6, 7, 8, 0], [9, 10, 11, -1])
    target = rows([0, 1, 2, 6], [3, 4, 5, 7], [-1, -1, -1, -1], [9, 10, 11, 8])
    limits = Limits.within(capacity, spare_slots=0)
    steps = follow(current, target, limits)
    assert len(steps) == 1
    moves = migration.diff(current, steps[0], live_R=capacity.live_R)
    assert [(m.expert, m.rank, m.sources) for m in moves] == [(6, 0, ()), (7, 1, ()), (8, 3, ())]
    with pytest.raises(WalkError, match="rank 2, which is dead or about to leave"):
        waves.next_wave(current, current, limits)


@pytest.mark.parametrize(
    ("target", "limits", "said"),
    [
        (rows([0, 1], [-1, -1]), Limits(slots_R=np.array([1, 2])), "2 experts on rank 0, which"),
        (rows([0, -1], [-1, -1]), Limits(), "no copy of expert 1 in layer 0"),
        (rows([0, 1]), Limits(), "1 layers on 1 ranks"),
    ],
)
def test_a_target_that_no_walk_may_lead_to_is_refused(
    target: SlotsLRS, limits: Limits, said: str
) -> None:
    with pytest.raises(WalkError, match=said):
        waves.next_wave(rows([0, -1], [1, -1]), target, limits)


def test_a_bound_below_one_weight_is_refused() -> None:
    with pytest.raises(WalkError, match="max_link_bytes is 9: an expert has 10 bytes"):
        Limits(bytes_per_expert=10, max_link_bytes=9)


def without_doubles(slots: SlotsLRS, width: int) -> SlotsLRS:
    """The published method puts two copies on a rank now and then: one of them is no use."""
    out = np.full((*slots.shape[:2], width), -1, dtype=np.int32)
    for layer, rank in np.ndindex(*slots.shape[:2]):
        experts = np.unique(slots[layer, rank])
        out[layer, rank, : len(experts)] = experts
    return out


def test_full_replans_that_move_nearly_everything_need_eight_waves_on_average() -> None:
    """Targets of the greedy method, which knows no placement in force, after a drift of ±30 %."""
    lengths = []
    for key, kind in ((key, kind) for key in ("a", "b", "c1", "c2", "d") for kind in LOADS):
        shape, load = SHAPES[key], make_load(key, kind)[:6]
        width = shape.slots // shape.ranks + 1
        before, after = (
            without_doubles(greedy_hierarchical.plan(one, shape.slots, shape.ranks), width)
            for one in (load, drift(load, 0.3, np.random.default_rng(7)))
        )
        steps = waves.walk(before, after)
        assert migration.reached(steps[-1], after)
        num_experts = load.shape[1]
        assert all((copies(step, num_experts) > 0).all() for step in steps)
        lengths.append(len(steps))
    assert np.mean(lengths) <= 8, lengths
    assert max(lengths) <= 16, lengths
