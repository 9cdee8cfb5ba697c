"""Small cases by hand: what went wrong elsewhere (A-cases), and exact answers.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench import placement_loads
from moe_api.deployment import slots_per_rank
from moe_api.serving import Experts
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits, CopyLimitsError
from moe_placement.goal import Goal, Split
from moe_placement.initial import InsufficientSlots, contiguous
from moe_placement.placement import Placement, copies, faults
from moe_placement.planned import Level
from moe_placement.planner import plan
from moe_placement.score import imbalance, rank_loads
from moe_placement.walk import waves

EXACT = 1e-6
BOTH_SPLITS = pytest.mark.parametrize("split", list(Split))


def largest(placement: Placement, load_LE: np.ndarray) -> float:
    return float(rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE).max())


@BOTH_SPLITS
def test_a01_nothing_needs_to_divide(split: Split) -> None:
    """60 experts on 8 + 8 + 4 ranks of three nodes: 4 slots each, 20 copies extra."""
    per_rank = slots_per_rank(Experts(), num_experts=60, num_ranks=20)
    assert per_rank == 4
    capacity = Capacity.of(per_rank, 20, domains=[0] * 8 + [1] * 8 + [2] * 4)
    load = np.random.default_rng(1).lognormal(5, 1, (3, 60))
    placement = plan(load, capacity, Goal(split=split)).placement
    assert list(faults(placement, np.full(3, 60), capacity)) == []
    if split is Split.FRACTIONS:
        assert (copies(placement.slots_LRS, 60).sum(axis=1) == 80).all(), "every slot is used"


@BOTH_SPLITS
def test_a02_a_hot_expert_is_once_on_each_rank(split: Split) -> None:
    load = np.array([[1000.0, 1, 1, 1, 1, 1, 1, 1]])
    placement = plan(load, Capacity.of(3, 4), Goal(split=split)).placement
    assert ((placement.slots_LRS[0] == 0).sum(axis=1) == 1).all()
    assert largest(placement, load) <= 252
    assert placement_loads.faults(placement.slots_LRS, 8, placement.fractions_LRS) == []


@BOTH_SPLITS
def test_a07_a_dead_rank_gets_nothing(split: Split) -> None:
    capacity = Capacity.of(4, 4, dead=[2])
    current = Placement.even(contiguous(1, 12, 4, 5))
    load = np.full((1, 12), 10.0)
    placement = plan(load, capacity, Goal(split=split), current).placement
    assert sorted(placement.slots_LRS[placement.slots_LRS >= 0].tolist()) == list(range(12))
    assert (placement.slots_LRS[:, 2] == -1).all()
    here = current.slots_LRS
    for wave in waves.walk(here, placement.slots_LRS, waves.Limits.within(capacity, 1)):
        assert (wave[:, 2] == -1).all(), "no transfer to or from the dead rank"


def test_a07_too_few_slots_name_the_uncovered_experts() -> None:
    """Never a silent partial plan: 3 ranks × 3 slots for 12 experts."""
    capacity = Capacity.of(3, 4, dead=[2])
    current = Placement.even(contiguous(1, 12, 4, 3))
    with pytest.raises(InsufficientSlots) as caught:
        plan(np.full((1, 12), 10.0), capacity, Goal(), current)
    assert len(caught.value.uncovered) == 3


@BOTH_SPLITS
def test_a11_each_layer_is_planned_and_judged_for_itself(split: Split) -> None:
    """Opposite imbalances of two layers do not cancel."""
    load = np.array([[100.0, 0], [0, 100]])
    one_slot = plan(load, Capacity.of(1, 2), Goal(split=split)).placement
    figures = imbalance(rank_loads(one_slot.slots_LRS, one_slot.fractions_LRS, load))
    assert figures is not None
    assert figures.per_layer == (2.0, 2.0)
    assert figures.worst == 2.0, "balancedness 0.5, not 1.0 over both"
    two_slots = plan(load, Capacity.of(2, 2), Goal(split=split)).placement
    figures = imbalance(rank_loads(two_slots.slots_LRS, two_slots.fractions_LRS, load))
    assert figures is not None
    assert figures.worst == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("load", "slots", "best"),
    [
        ([4, 1, 1], [2, 2], 3),
        ([3, 3, 3, 3], [2, 2], 6),
        ([6, 3, 3], [2, 2, 1], 4),
        ([5, 4, 3], [2, 2, 2], 4),
        ([9, 1, 1, 1], [2, 2, 2], 4),
        ([7], [1, 1, 1], 7 / 3),
        ([1, 2, 3], [3, 0], 6),
        ([8, 8], [1, 2], 8),
    ],
)
def test_exact_small_cases_with_fractions(load: list[int], slots: list[int], best: float) -> None:
    load_LE = np.asarray([load], dtype=np.float64)
    placement = plan(load_LE, Capacity.of(slots)).placement
    assert largest(placement, load_LE) == pytest.approx(best, rel=EXACT)


@pytest.mark.parametrize(
    ("load", "slots", "best"),
    [
        ([4, 1, 1], [2, 2], 3),
        ([3, 3, 3, 3], [2, 2], 6),
        ([5, 4, 3], [2, 2, 2], 4),
        ([5, 5, 5], [2, 2, 2], 5),
        ([9, 1, 1, 1], [2, 2, 2], 4),
        ([6, 4, 2], [2, 2], 6),
        ([7], [1, 1, 1], 7 / 3),
    ],
)
def test_exact_small_cases_with_an_even_split(
    load: list[int], slots: list[int], best: float
) -> None:
    load_LE = np.asarray([load], dtype=np.float64)
    placement = plan(load_LE, Capacity.of(slots), Goal(split=Split.EVEN)).placement
    assert largest(placement, load_LE) == pytest.approx(best, rel=EXACT)


def test_a_slow_rank_gets_less() -> None:
    load = np.array([[30.0, 20, 10, 10]])
    capacity = Capacity.of(3, 3, speeds=[1.0, 1.0, 0.5])
    placement = plan(load, capacity).placement
    loads = rank_loads(placement.slots_LRS, placement.fractions_LRS, load)[0]
    assert loads == pytest.approx([28, 28, 14], rel=EXACT)


def test_a_draining_rank_is_emptied_and_its_experts_live_elsewhere() -> None:
    capacity = Capacity.of(4, 4, draining=[1])
    current = Placement.even(contiguous(2, 12, 4, 5))
    placement = plan(np.ones((2, 12)), capacity, Goal(), current).placement
    assert (placement.slots_LRS[:, 1] == -1).all()
    assert list(faults(placement, np.full(2, 12), capacity)) == []


def test_layers_may_have_different_numbers_of_experts() -> None:
    load = np.array([[4.0, 1, 1, 0], [3, 3, 3, 3]])
    placement = plan(load, Capacity.of(2, 2), experts_L=np.array([3, 4])).placement
    assert set(placement.slots_LRS[0].ravel().tolist()) <= {-1, 0, 1, 2}
    loads = rank_loads(placement.slots_LRS, placement.fractions_LRS, load)
    assert loads.max(axis=1) == pytest.approx([3, 6], rel=EXACT)


@BOTH_SPLITS
def test_an_idle_model_is_placed_whole(split: Split) -> None:
    placement = plan(np.zeros((2, 5)), Capacity.of(2, 3), Goal(split=split)).placement
    assert list(faults(placement, np.full(2, 5), Capacity.of(2, 3))) == []


@BOTH_SPLITS
def test_no_load_keeps_what_is_in_force(split: Split) -> None:
    current = Placement.even(contiguous(2, 6, 3, 3))
    planned = plan(np.zeros((2, 6)), Capacity.of(2, 3), Goal(split=split), current)
    assert planned.level is Level.KEPT
    assert planned.moves == 0
    assert np.array_equal(planned.placement.slots_LRS, current.slots_LRS)


@BOTH_SPLITS
def test_no_move_is_made_without_a_budget(split: Split) -> None:
    current = Placement.even(contiguous(1, 6, 3, 3))
    load = np.array([[100.0, 90, 1, 1, 1, 1]])
    planned = plan(load, Capacity.of(3, 3), Goal(split=split, max_moves=0), current)
    assert np.array_equal(planned.placement.slots_LRS, current.slots_LRS)
    assert planned.given_up, "what was not reached is said"


def test_copies_that_cannot_be_had_are_an_error_that_names_the_way_out() -> None:
    with pytest.raises(CopyLimitsError, match="lower min_copies or add slots"):
        plan(np.ones((1, 4)), Capacity.of(2, 3), Goal(copies=CopyLimits(min_copies=2)))


@BOTH_SPLITS
@pytest.mark.parametrize(("least", "most"), [(2, None), (2, 2), (1, 1), (3, 3)])
def test_copy_limits_hold(split: Split, least: int, most: int | None) -> None:
    load = np.array([[1000.0, 1, 1, 1, 1, 1]])
    goal = Goal(split=split, copies=CopyLimits(least, most))
    placement = plan(load, Capacity.of(5, 4), goal).placement
    counts = copies(placement.slots_LRS, 6)[0]
    assert counts.min() >= least
    assert counts.max() <= (most or 4)
