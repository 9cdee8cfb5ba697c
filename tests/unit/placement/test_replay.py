"""Recorded windows under each strategy: what is reached, what is moved, and why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bench import greedy_hierarchical, placement_loads
from bench.recorded_loads import trace
from moe_placement import initial
from moe_placement.decision.decide import Mode, Policy
from moe_placement.decision.replay import Replayed, Strategy, replay
from moe_placement.placement import Placement, received
from moe_placement.planned import Level
from moe_placement.planner import plan
from moe_placement.score import LoadLE

SMALL = Policy(Mode.AUTO, 3, 5, 60, 64, bytes_per_expert=1000)
RECORDED = Policy(Mode.AUTO, 5, 5, 0, 64)
"""Of the recorded model: 64 experts in 80 slots of 16 ranks."""


def windows(*hot: int, tokens: float = 8000.0) -> list[LoadLE]:
    """Two layers of four experts; one of them has half of the tokens."""
    out = []
    for expert in hot:
        load = np.full((2, 4), tokens / 6)
        load[:, expert] = tokens / 2
        out.append(load)
    return out


def run(
    loads: list[LoadLE], strategy: Strategy, policy: Policy = SMALL, **given: object
) -> Replayed:
    return replay(loads, 2, 4, policy, strategy, **given)  # type: ignore[arg-type]


def test_a_steady_load_costs_nothing_after_the_first_plan() -> None:
    for strategy in Strategy:
        found = run(windows(0, 0, 0, 0), strategy)
        assert [w.number for w in found.windows] == [1, 2, 3]
        assert (found.moves, found.bytes, found.waves) == (0, 0, 0)
        assert found.gap == pytest.approx(0, abs=1e-3)
        assert found.imbalance == pytest.approx(1, abs=1e-3)


def test_a_placement_is_scored_by_a_window_that_it_does_not_know() -> None:
    found = run(windows(0, 0, 2, 2), Strategy.POLICY, replace(SMALL, cooldown_seconds=0))
    reached = [w.imbalance for w in found.windows]
    assert reached[0] == pytest.approx(1, abs=1e-3)
    assert reached[1] is not None
    assert reached[1] > 1.2, "nobody could know"
    assert reached[2] is not None
    assert reached[2] < 1.05
    assert found.windows[2].change.reason == "AboveTarget"
    assert found.windows[2].change.predicted == pytest.approx(reached[2], abs=0.05)
    assert "gain" in found.windows[2].change.message


def test_static_and_fractions_move_nothing() -> None:
    loads = windows(0, 1, 2, 3, 0)
    static, fractions = (run(loads, s) for s in (Strategy.STATIC, Strategy.FRACTIONS))
    assert static.moves == fractions.moves == 0
    assert fractions.gap_solved == pytest.approx(static.gap_solved), "the copies are the same"
    assert {w.change.level for w in fractions.windows[1:]} == {Level.FRACTIONS}


def test_from_a_given_start_the_first_window_counts_too() -> None:
    start = Placement.even(initial.contiguous(2, 4, 2, 4))
    found = run(windows(0, 0, 0), Strategy.POLICY, start=start)
    assert [w.number for w in found.windows] == [0, 1, 2]
    assert found.windows[0].change.reason == "Start"
    first = found.windows[1].change
    assert (first.reason, first.moves > 0, first.waves > 0) == ("AboveTarget", True, True)
    assert found.bytes == found.moves * 1000
    assert found.moved_share == found.moves / (2 * 6 * 3)


def test_a_long_walk_goes_on_in_the_next_window() -> None:
    start = Placement.even(initial.contiguous(2, 4, 2, 4))
    slow = replace(SMALL, max_moves_per_round=1, deadline_seconds=1000)
    found = run(windows(*[0] * 8), Strategy.POLICY, slow, start=start, window_seconds=2.0)
    reasons = [w.change.reason for w in found.windows]
    assert reasons[:3] == ["Start", "AboveTarget", "WalkContinues"]
    assert all(w.change.waves <= 1 for w in found.windows)


def test_a_window_with_too_few_tokens_is_no_sample() -> None:
    loads = [*windows(0, 0), np.zeros((2, 4)), *windows(3, tokens=60), *windows(0)]
    for strategy in Strategy:
        found = run(loads, strategy)
        assert np.isfinite(found.gap)
        assert found.windows[1].imbalance is None
        assert found.windows[1].gap == 0
    assert [w.change.reason for w in run(loads, Strategy.POLICY).windows][2:] == ["NoTraffic"] * 2


WINDOWS = [load[::3] for load in trace(1024)]
"""Four domains in turn, twice: 64 windows of 1024 tokens, every third layer."""


@pytest.fixture(scope="module")
def recorded() -> dict[Strategy, Replayed]:
    strategies = (Strategy.STATIC, Strategy.STEPS, Strategy.POLICY)
    return {one: replay(WINDOWS, 16, 6, RECORDED, one) for one in strategies}


def published() -> tuple[float, float]:
    """Of the method everybody uses, planned anew from every window: (mean gap of the next window,
    weights moved per window of all slots)."""
    gaps, moved, before = [], [], None
    for planned, served in pairwise(WINDOWS):
        slots = greedy_hierarchical.plan(planned, 80, 16)
        gaps.append(placement_loads.gap(slots, served).mean())
        if before is not None:
            moved.append(placement_loads.weights_received(before, slots) / slots.size)
        before = slots
    return float(np.mean(gaps)), float(np.mean(moved))


def test_on_the_recorded_trace_a_tenth_of_the_moves_does_as_well(
    recorded: dict[Strategy, Replayed],
) -> None:
    gap, moved = published()
    for strategy in (Strategy.STEPS, Strategy.POLICY):
        found = recorded[strategy]
        assert found.gap <= gap
        assert found.gap_solved <= 0.15
        assert found.moved_share <= 0.1 * moved
        assert found.waves / len(found.windows) <= 8
    assert recorded[Strategy.STATIC].gap > 0.6


def test_the_policy_moves_as_little_as_steps_and_says_why_not(
    recorded: dict[Strategy, Replayed],
) -> None:
    steps, policy = recorded[Strategy.STEPS], recorded[Strategy.POLICY]
    # It also moves beyond the budget where that pays, and pauses where chance explains a gain.
    assert policy.moves < 1.25 * steps.moves
    assert policy.gap < steps.gap + 0.01
    reasons = Counter(window.change.reason for window in policy.windows)
    assert reasons["AboveTarget"] > 10
    assert reasons["GainBelowMinimum"] > 10
    assert all(window.change.message for window in policy.windows if window.number > 1)


def test_a_full_plan_knows_nothing_of_what_is_in_force() -> None:
    loads = windows(0, 1)
    found = run(loads, Strategy.FULL, start=Placement.even(initial.contiguous(2, 4, 2, 4)))
    goal = SMALL.goal(None, SMALL.capacity(2, 4, 4), 4)
    fresh = plan(loads[0], SMALL.capacity(2, 4, 4), goal).placement.slots_LRS
    assert found.windows[1].change.moves == received(initial.contiguous(2, 4, 2, 4), fresh)
