"""The least crossing split: as good as a linear program, never above the balance it may cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, vstack

from moe_placement.capacity import Capacity
from moe_placement.placement import Placement, faults
from moe_placement.score import rank_loads
from moe_placement.split import best_fractions
from moe_placement.topology import crossing, dispatch, relief

Case = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """(loads by source, slots, speeds, domains): any placement, two layers."""
    num_ranks = draw(st.integers(1, 9))
    num_experts = draw(st.integers(1, 11))
    num_domains = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    domains = rng.integers(0, num_domains, num_ranks)
    width = draw(st.integers(-(-num_experts // num_ranks), num_experts))
    slots = np.full((2, num_ranks, width), -1, dtype=np.int32)
    for layer in range(2):
        for rank in range(num_ranks):
            mine = np.arange(rank, num_experts, num_ranks)
            others = rng.permutation(np.setdiff1d(np.arange(num_experts), mine))
            held = np.concatenate([mine, others[: rng.integers(0, width - len(mine) + 1)]])
            slots[layer, rank, : len(held)] = rng.permutation(held)
    loads = rng.lognormal(2, 1.5, (2, num_experts, num_domains))
    loads *= rng.random(loads.shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    speeds = rng.choice([0.5, 0.7, 1.0], num_ranks) if draw(st.booleans()) else np.ones(num_ranks)
    return loads, slots, speeds, domains


@settings(deadline=None, max_examples=80)
@given(cases(), st.sampled_from([0.0, 0.02, 0.3]))
def test_keeps_the_balance_and_crosses_as_little_as_a_linear_program(
    case: Case, slack: float
) -> None:
    loads, slots, speeds, domains = case
    load = loads.sum(axis=2)
    fractions = crossing.least_crossing(loads, slots, speeds, domains, slack)
    experts = np.full(2, load.shape[1])
    capacity = Capacity.of([slots.shape[2]] * len(speeds), speeds=speeds)
    assert not list(faults(Placement(slots, fractions), experts, capacity))
    best = rank_loads(slots, best_fractions(load, slots, speeds), load)
    limit = (best / speeds).max(axis=1) * (1 + slack)
    mine = (rank_loads(slots, fractions, load) / speeds).max(axis=1)
    assert (mine <= limit * (1 + 1e-6) + 1e-9).all()
    share = dispatch.crossing_share(slots, fractions, domains, loads)
    for layer in range(2):
        least = _least(loads[layer], slots[layer], speeds, domains, limit[layer] * (1 + 1e-7))
        assert share[layer] <= least + 1e-4


def _least(
    loads_ED: npt.NDArray[np.float64],
    slots_RS: npt.NDArray[np.int32],
    speeds_R: npt.NDArray[np.float64],
    domains_R: npt.NDArray[np.int64],
    limit: float,
) -> float:
    """Least share that crosses with no rank above limit · speed, by linear programming: tokens of
    each copy, and of these the ones from its own domain."""
    if not loads_ED.sum():
        return 0.0
    rank_N, slot_N = np.nonzero(slots_RS >= 0)
    expert_N = slots_RS[rank_N, slot_N]
    num_experts, num_domains = loads_ED.shape
    copies, homes = len(rank_N), loads_ED.size
    ones = np.ones(copies)
    served = coo_matrix((ones, (expert_N, np.arange(copies))), (num_experts, copies + homes))
    ranks = coo_matrix((ones, (rank_N, np.arange(copies))), (len(speeds_R), copies + homes))
    home_N = expert_N * num_domains + domains_R[rank_N]
    near = coo_matrix(
        (
            np.concatenate([-ones, np.ones(homes)]),
            (
                np.concatenate([home_N, np.arange(homes)]),
                np.concatenate([np.arange(copies), copies + np.arange(homes)]),
            ),
        ),
        (homes, copies + homes),
    )
    result = linprog(
        np.concatenate([np.zeros(copies), -np.ones(homes)]),
        A_ub=vstack([ranks, near]),
        b_ub=np.concatenate([limit * speeds_R, np.zeros(homes)]),
        A_eq=served,
        b_eq=loads_ED.sum(axis=1),
        bounds=[(0, None)] * copies + [(0, load) for load in loads_ED.ravel()],
        method="highs",
    )
    assert result.success, result.message
    return float(1 + result.fun / loads_ED.sum())


def test_a_token_goes_abroad_only_when_its_own_rank_is_full() -> None:
    """Two domains of one rank; both hold expert 0, each its own other expert. Expert 0 has 10
    tokens of each domain, expert 1 has 6 of domain 0."""
    slots = np.array([[[0, 1], [0, 2]]], dtype=np.int32)
    loads = np.array([[[10.0, 10.0], [6.0, 0.0], [0.0, 0.0]]])
    domains, speeds = np.array([0, 1]), np.ones(2)
    even = crossing.least_crossing(loads, slots, speeds, domains, slack=0.0)
    assert even[0, 0, 0] == pytest.approx(7 / 20), "13 tokens each"
    relaxed = crossing.least_crossing(loads, slots, speeds, domains, slack=0.1)
    assert relaxed[0, 0, 0] == pytest.approx((14.3 - 6) / 20), "no more than balance asks for"
    free = crossing.least_crossing(loads, slots, speeds, domains, slack=1.0)
    assert free[0, 0, 0] == pytest.approx(0.5), "all at home"


def test_a_level_that_cannot_be_kept_is_met_as_nearly_as_possible() -> None:
    slots = np.array([[[0, 1], [0, 2]]], dtype=np.int32)
    loads = np.array([[[10.0, 10.0], [6.0, 0.0], [0.0, 0.0]]])
    fractions = crossing.least_crossing(
        loads, slots, np.ones(2), np.array([0, 1]), level_L=np.array([5.0])
    )
    assert rank_loads(slots, fractions, loads.sum(axis=2)) == pytest.approx(np.array([[13, 13]]))


def test_a_layer_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(3)
    slots = np.stack([rng.permuted(np.arange(24) % 16).reshape(8, 3) for _ in range(5)])
    loads = rng.lognormal(0, 1.5, (5, 16, 2))
    domains, speeds = np.arange(8) // 4, np.ones(8)
    slots = slots.astype(np.int32)
    both = crossing.least_crossing(loads, slots, speeds, domains)
    for layer in range(5):
        alone = crossing.least_crossing(
            loads[layer : layer + 1], slots[layer : layer + 1], speeds, domains
        )
        assert np.allclose(both[layer], alone[0], atol=1e-9)


def test_many_copies_and_domains_cross_as_little_as_a_linear_program() -> None:
    """Dense cases, in which a token sent abroad for one rank comes home again for another."""
    rng = np.random.default_rng(61)
    num_ranks, num_experts, num_layers = 6, 6, 150
    domains, speeds = np.arange(num_ranks) % 3, np.ones(num_ranks)
    slots = np.full((num_layers, num_ranks, num_experts), -1, dtype=np.int32)
    for layer in range(num_layers):
        for expert in range(num_experts):
            on = rng.permutation(num_ranks)[: rng.integers(2, 5)]
            slots[layer, on, expert] = expert
    loads = rng.lognormal(0, 1.5, (num_layers, num_experts, 3))
    load = loads.sum(axis=2)
    best = rank_loads(slots, best_fractions(load, slots, speeds), load).max(axis=1)
    fractions = crossing.least_crossing(loads, slots, speeds, domains, slack=0.1)
    share = dispatch.crossing_share(slots, fractions, domains, loads)
    least = [
        _least(loads[layer], slots[layer], speeds, domains, 1.1 * best[layer])
        for layer in range(num_layers)
    ]
    assert share == pytest.approx(least, abs=1e-5)


def test_a_search_cut_short_keeps_the_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    slots = np.stack([rng.permutation(48) % 24 for _ in range(4)]).reshape(4, 16, 3)
    slots = slots.astype(np.int32)
    loads = rng.lognormal(0, 1.5, (4, 24, 4))
    domains, speeds = np.arange(16) // 4, np.ones(16)
    load = loads.sum(axis=2)
    best = rank_loads(slots, best_fractions(load, slots, speeds), load).max(axis=1)
    whole = crossing.least_crossing(loads, slots, speeds, domains)
    monkeypatch.setattr(relief, "MAX_ROUNDS", 1)
    short = crossing.least_crossing(loads, slots, speeds, domains)
    assert not np.allclose(short, whole)
    assert (rank_loads(slots, short, load).max(axis=1) <= best * (1.02 + 1e-6)).all()
