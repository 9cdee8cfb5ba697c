"""Carrying cut experts from rank to rank: exact wherever the theorem says so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import placement_loads
from moe_placement.full import blocks, carry, groups
from moe_placement.full.carry import Filled

COUNTS = st.one_of(st.integers(0, 5), st.integers(0, 1000), st.just(10**6))


def rows(load: list[float], times: int = 1) -> np.ndarray:
    return np.tile(np.array(load, dtype=np.float64), (times, 1))


def tokens_of(filled: Filled, num_experts: int) -> np.ndarray:
    """[N, E]"""
    out = np.zeros((len(filled.slots_NRS), num_experts))
    problem, rank, slot = np.nonzero(filled.slots_NRS >= 0)
    np.add.at(
        out,
        (problem, filled.slots_NRS[problem, rank, slot]),
        filled.tokens_NRS[problem, rank, slot],
    )
    return out


def assert_exact(filled: Filled, load: np.ndarray, slots: np.ndarray, shares: np.ndarray) -> None:
    """All tokens placed, no expert twice on a rank, every rank at its share."""
    total_N = load.sum(axis=1)
    assert filled.whole_N.all()
    assert np.allclose(tokens_of(filled, load.shape[1]), load, rtol=1e-6, atol=1e-9 * total_N.max())
    wanted = total_N[:, None] * shares / shares.sum()
    assert np.allclose(filled.tokens_NRS.sum(axis=2), wanted, rtol=1e-6)
    held = np.sort(filled.slots_NRS, axis=2)
    assert not ((held[:, :, 1:] == held[:, :, :-1]) & (held[:, :, 1:] >= 0)).any()
    assert ((filled.slots_NRS >= 0).sum(axis=2) <= slots).all()
    assert all(set(row.ravel()) >= set(range(load.shape[1])) for row in filled.slots_NRS)


def test_by_hand() -> None:
    """Rank 0 takes the least loaded (1, 2) and a piece of the most loaded (9); its rest, 3, goes
    on to rank 1 with 2 more whole experts, of which together they have just enough."""
    filled = carry.fill(
        rows([9, 1, 2, 3, 3]), np.array([5]), np.array([[3, 3]]), np.array([[1.0, 1.0]])
    )
    assert filled.slots_NRS.tolist() == [[[1, 2, 0], [3, 4, 0]]]
    assert np.allclose(filled.tokens_NRS, [[[1, 2, 6], [3, 3, 3]]])


def test_a_rank_that_small_experts_do_not_fill_takes_from_the_top() -> None:
    """The second rank holds the rest of 10 (1 token) and needs two heavy ones to reach 10."""
    filled = carry.fill(
        rows([10, 1, 5, 5, 5, 4]), np.array([6]), np.array([[3, 3, 3]]), np.ones((1, 3))
    )
    assert np.allclose(filled.tokens_NRS.sum(axis=2), 10)
    assert filled.whole_N.all()


def test_problems_of_different_size_stand_side_by_side() -> None:
    """The second has two experts and one rank less."""
    load = np.array([[4.0, 4.0, 4.0, 4.0], [6.0, 2.0, 0.0, 0.0]])
    slots = np.array([[2, 2, 2], [3, 2, 0]])
    filled = carry.fill(load, np.array([4, 2]), slots, np.array([[1.0, 1, 1], [1, 1, 0]]))
    assert np.allclose(filled.tokens_NRS.sum(axis=2), [[16 / 3, 16 / 3, 16 / 3], [4, 4, 0]])
    assert (filled.slots_NRS[1] < 2).all()


def test_too_few_slots_are_reported() -> None:
    filled = carry.fill(
        rows([4, 4, 4, 4]), np.array([4]), np.array([[2, 2]]), np.array([[1.0, 1.0]])
    )
    assert filled.whole_N.all(), "equal loads need no link"
    filled = carry.fill(
        rows([5, 4, 4, 2]), np.array([4]), np.array([[2, 2]]), np.array([[1.0, 1.0]])
    )
    assert not filled.whole_N.any()


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_shares_like_slots_are_reached_exactly(data: st.DataObject) -> None:
    """k_r ≥ 2, shares in proportion to k_r − 1, E ≤ 1 + Σ (k_r − 1): any loads."""
    slots = data.draw(st.lists(st.integers(2, 6), min_size=1, max_size=9))
    alike = data.draw(st.booleans())
    slots_R = np.array([slots[0]] * len(slots) if alike else slots)
    most = 1 + int((slots_R - 1).sum())
    num_experts = data.draw(st.one_of(st.just(most), st.integers(1, most)))
    draws = st.lists(COUNTS, min_size=num_experts, max_size=num_experts)
    load = np.array(data.draw(st.lists(draws, min_size=1, max_size=3)), dtype=np.float64)
    load[load.sum(axis=1) == 0] = 1.0
    shares_R = (slots_R - 1).astype(np.float64)
    tiled = (len(load), 1)
    filled = carry.fill(
        load, np.full(len(load), num_experts), np.tile(slots_R, tiled), np.tile(shares_R, tiled)
    )
    assert_exact(filled, load, slots_R, shares_R)
    assert_exact(blocks.fill(load, slots_R, shares_R), load, slots_R, shares_R)


@pytest.mark.parametrize("hasty_first", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "slots"), [(31, 94, 4), (37, 37, 2), (7, 1, 2)]
)
def test_blocks_share_one_expert_each(
    num_ranks: int, num_experts: int, slots: int, hasty_first: bool
) -> None:
    load = np.random.default_rng(5).lognormal(0, 1.5, (3, num_experts))
    slots_R, shares_R = np.full(num_ranks, slots), np.ones(num_ranks)
    filled = blocks.fill(load, slots_R, shares_R, hasty_first=hasty_first)
    assert_exact(filled, load, slots_R, shares_R)
    copies = (filled.slots_NRS >= 0).sum(axis=(1, 2))
    assert (copies <= num_experts + num_ranks - 1).all(), "one cut a rank at most"


@pytest.mark.parametrize("kind", ["zipf0.6", "hotdomain"])
@pytest.mark.parametrize("slots", [(5, 5, 5, 5), (4, 6, 4, 6)])
def test_blocks_hold_ranks_that_are_alike(slots: tuple[int, ...], kind: str) -> None:
    """With ranks mixed in a block, or the hasty ones first, the last ranks get stuck."""
    load = placement_loads.make_load("b", kind)
    slots_R, shares_R = np.tile(slots, 8), np.tile([0.7, 1.0, 1.0, 1.0], 8)
    assert_exact(blocks.fill(load, slots_R, shares_R), load, slots_R, shares_R)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_packing_is_no_worse_than_most_loaded_first(data: st.DataObject) -> None:
    """Places of a group are kept, and exchanges only ever lower the largest level."""
    num_groups = data.draw(st.integers(1, 5))
    room = data.draw(st.lists(st.integers(0, 5), min_size=num_groups, max_size=num_groups))
    num_experts = data.draw(st.integers(0, sum(room)))
    if num_experts == 0:
        return
    load = np.array(
        [data.draw(st.lists(COUNTS, min_size=num_experts, max_size=num_experts))], dtype=np.float64
    )
    speeds = data.draw(
        st.lists(st.sampled_from([1.0, 0.7, 2.0]), min_size=num_groups, max_size=num_groups)
    )
    room_LG, speed_LG = np.array([room]), np.array([speeds])
    group_E = groups.pack(load, room_LG, speed_LG, np.zeros(1))[0]
    assert (np.bincount(group_E, minlength=num_groups) <= room).all()
    simple_E = most_loaded_first(load[0], room, speeds)
    level = np.bincount(group_E, load[0], num_groups) / speeds
    simple = np.bincount(simple_E, load[0], num_groups) / speeds
    assert level.max() <= simple.max() * (1 + 1e-9)
    assert no_exchange_helps(load[0], group_E, room, np.array(speeds))


def most_loaded_first(load_E: np.ndarray, room: list[int], speeds: list[float]) -> np.ndarray:
    group_E = np.zeros(len(load_E), dtype=np.int64)
    sums, counts = np.zeros(len(room)), np.zeros(len(room))
    for expert in np.argsort(-load_E, kind="stable"):
        level = [
            (sums[g] + load_E[expert]) / speeds[g] if counts[g] < room[g] else np.inf
            for g in range(len(room))
        ]
        group = int(np.argmin(level))
        group_E[expert], counts[group] = group, counts[group] + 1
        sums[group] += load_E[expert]
    return group_E


def no_exchange_helps(
    load_E: np.ndarray, group_E: np.ndarray, room: list[int], speeds: np.ndarray
) -> bool:
    sums = np.bincount(group_E, load_E, len(room))
    counts = np.bincount(group_E, minlength=len(room))
    fullest = int(np.argmax(sums / speeds))
    for expert in np.flatnonzero(group_E == fullest):
        for group in np.flatnonzero(np.arange(len(room)) != fullest):
            others = load_E[group_E == group].tolist()
            others += [0.0] if counts[group] < room[group] else []
            for other in others:
                less = load_E[expert] - other
                after = max(
                    (sums[fullest] - less) / speeds[fullest], (sums[group] + less) / speeds[group]
                )
                if after < (sums / speeds).max() * (1 - 1e-6):
                    return False
    return True


def test_groups_share_nothing_and_heavy_experts_get_enough_ranks() -> None:
    """8 slots on 4 ranks for 6 experts: two groups; expert 0 alone needs three ranks."""
    load = rows([27, 8, 2, 1, 1, 1])
    filled = groups.fill(load, np.full(4, 2), np.ones(4), np.array([10.0]), links=2)
    assert filled.whole_N.all()
    assert np.allclose(filled.tokens_NRS.sum(axis=2), 10)
    copies = np.bincount(filled.slots_NRS[filled.slots_NRS >= 0], minlength=6)
    assert copies.tolist() == [3, 1, 1, 1, 1, 1]
