"""Recorded loads of real models: plans for one domain, and a trace whose domains change.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from bench import exact_pairs, placement_loads, recorded_loads, trace_rows
from bench.full_rows import EVEN, FRACTIONS
from moe_placement.capacity import Capacity
from moe_placement.goal import Goal
from moe_placement.placement import Placement
from moe_placement.planner import plan

NUM_SLOTS, NUM_RANKS = 80, 16
"""For 64 experts, as in the design's numbers: slots ≥ experts + ranks − 1."""
SIXTY_FOUR = [
    (model, domain)
    for model in ("esft_v2lite", "olmoe_1b7b")
    for domain in recorded_loads.counts(model)
]


def gap_of(load_LE: npt.NDArray[np.float64], goal: Goal) -> npt.NDArray[np.float64]:
    placement = plan(load_LE, Capacity.of(NUM_SLOTS // NUM_RANKS, NUM_RANKS), goal).placement
    assert placement_loads.faults(placement.slots_LRS, 64, placement.fractions_LRS) == []
    return placement_loads.gap(placement.slots_LRS, load_LE, placement.fractions_LRS)


def test_counts_and_tokens_of_the_recording_agree() -> None:
    recorded = recorded_loads.counts("esft_v2lite")
    for domain in recorded_loads.DOMAINS:
        counted = recorded_loads.counted(recorded_loads.routing(domain), 64)
        assert np.array_equal(counted, recorded[domain])


@pytest.mark.parametrize(("model", "domain"), SIXTY_FOUR)
def test_a_recorded_load_is_balanced_to_the_bound(model: str, domain: str) -> None:
    load = recorded_loads.counts(model)[domain]
    assert gap_of(load, FRACTIONS).max() <= 1e-4
    even = gap_of(load, EVEN)
    assert even.mean() <= 0.005
    assert even.max() <= 0.01


@pytest.mark.parametrize("domain", list(recorded_loads.counts("mixtral_8x7b")))
def test_recorded_mixtral_is_split_evenly_as_well_as_can_be(domain: str) -> None:
    load = recorded_loads.counts("mixtral_8x7b")[domain]
    placement = plan(load, Capacity.of(2, 8), EVEN).placement
    largest = placement_loads.rank_load(placement.slots_LRS, load).max(axis=1)
    exact = np.array([exact_pairs.best_even_level(load_E, 8) for load_E in load])
    assert largest == pytest.approx(exact, rel=0.005)


def test_the_trace_needs_a_tenth_of_the_moves_of_planning_afresh() -> None:
    """Windows of 1024 tokens, planned from the one before: what is realised in the next window,
    against the greedy method's, and with the fractions solved again for it."""
    windows = recorded_loads.trace(1024, 64, rounds=1)[4:20]
    theirs = trace_rows.replayed(windows, 1.0, trace_rows.published)
    ours = trace_rows.replayed(windows, 1.0, trace_rows.ours(trace_rows.GOALS["fractions"]))
    assert ours.gap <= theirs.gap
    assert ours.moves <= 0.1 * theirs.moves
    assert ours.gap_solved <= 0.15


def test_a_domain_that_comes_back_finds_what_it_needs() -> None:
    """From one domain to the next and back: planned for each, within the aim each time."""
    capacity = Capacity.of(NUM_SLOTS // NUM_RANKS, NUM_RANKS)
    recorded = recorded_loads.counts("esft_v2lite")
    current: Placement | None = None
    for domain in ("law", "intent", "law", "translation"):
        current = plan(recorded[domain], capacity, FRACTIONS, current).placement
        gap = placement_loads.gap(current.slots_LRS, recorded[domain], current.fractions_LRS)
        assert gap.max() <= FRACTIONS.aim + 1e-9
