"""Experts that tokens choose together share a domain, and balance does not suffer for it.

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import recorded_loads, topology_rows
from bench.placement_loads import gap
from moe_placement.bound import lower_bound
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.full import full_fractions
from moe_placement.placement import Placement, faults
from moe_placement.score import rank_loads
from moe_placement.topology import together
from tests.support.planning_problems import Problem, problems


def domains_of(slots_RS: npt.NDArray[np.int32], domains_R: npt.NDArray[np.int64]) -> list[set[int]]:
    return [
        {int(e) for e in slots_RS[domains_R == d].ravel() if e >= 0} for d in np.unique(domains_R)
    ]


def test_companions_share_a_domain() -> None:
    """Four groups of four experts whose numbers are mixed up: each group ends on one node."""
    group_E = np.array([0, 1, 2, 3] * 4)
    pairs = (group_E[:, None] == group_E[None, :]) * 100.0 + 1.0
    domains_R = np.repeat(np.arange(4), 2)
    slots, fractions = together.plan(
        np.ones((1, 16)), pairs[None], np.full(8, 3), np.ones(8), domains_R, CopyLimits()
    )
    held = domains_of(slots[0], domains_R)
    for group in range(4):
        members = set(np.flatnonzero(group_E == group).tolist())
        assert any(members <= experts for experts in held)
    assert gap(slots, np.ones((1, 16)), fractions).max() <= together.SLACK


@settings(deadline=None, max_examples=60)
@given(problems(present=False, closed=False, ragged=False), st.integers(0, 2**32 - 1))
def test_any_plan_is_valid_and_nearly_as_balanced_as_without_pairs(
    problem: Problem, seed: int
) -> None:
    load, capacity = problem.load_LE, problem.capacity
    num_layers, num_experts = load.shape
    drawn = np.random.default_rng(seed).integers(0, 50, (num_layers, num_experts, num_experts))
    pairs = (drawn + drawn.transpose(0, 2, 1)).astype(np.float64)
    ranks = (capacity.slots_R, capacity.speeds_R)
    out = together.plan(load, pairs, *ranks, capacity.domains_R, CopyLimits())
    assert list(faults(Placement(*out), problem.experts_L, capacity)) == []
    level_L, without_L = (
        (rank_loads(*plan, load) / capacity.speeds_R).max(axis=1)
        for plan in (out, full_fractions.plan(load, *ranks, CopyLimits()))
    )
    allowed_L = np.maximum(lower_bound(load, *ranks) * (1 + together.SLACK), without_L)
    assert (level_L <= allowed_L * (1 + 1e-9)).all()


def test_copy_limits_hold() -> None:
    pairs = np.ones((1, 8, 8))
    limits = CopyLimits(min_copies=2, max_copies=2)
    domains_R = np.repeat(np.arange(2), 2)
    load = np.array([[9.0, 1, 1, 1, 1, 1, 1, 1]])
    slots, _ = together.plan(load, pairs, np.full(4, 4), np.ones(4), domains_R, limits)
    assert (np.bincount(slots[slots >= 0], minlength=8) == 2).all()


def test_one_domain_is_planned_as_ever() -> None:
    load = np.random.default_rng(1).lognormal(0, 1, (2, 12))
    args = (np.full(4, 4), np.ones(4))
    slots, fractions = together.plan(
        load, np.ones((2, 12, 12)), *args, np.zeros(4, dtype=np.int64), CopyLimits()
    )
    expected = full_fractions.plan(load, *args, CopyLimits())
    assert np.array_equal(slots, expected[0])
    assert np.array_equal(fractions, expected[1])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [(np.ones((1, 3, 4)), "shape"), (np.full((1, 4, 4), -1.0), "not negative")],
)
def test_pairs_that_do_not_fit_are_refused(pairs: npt.NDArray[np.float64], message: str) -> None:
    capacity = Capacity.of(2, 4, domains=[0, 0, 1, 1])
    with pytest.raises(together.PairsError, match=message):
        together.plan(
            np.ones((1, 4)), pairs, capacity.slots_R, capacity.speeds_R, capacity.domains_R,
            CopyLimits(),
        )  # fmt: skip


def test_real_routing_reaches_a_third_fewer_nodes() -> None:
    """Planned on half of a domain's tokens, counted on the other half, beside the greedy plan."""
    tokens = recorded_loads.routing("law")[:, ::6]
    half = len(tokens) // 2
    reached = topology_rows.nodes_reached(tokens[:half], tokens[half:])
    assert reached.ours_fewest <= 0.67 * reached.published_fewest
    assert reached.ours_drawn <= 0.85 * reached.published_drawn
    assert reached.ours_imbalance <= reached.published_imbalance + 0.03
