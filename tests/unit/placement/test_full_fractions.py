"""Full plans with fractions: exact where the theorem says so, valid and near the best elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench import greedy_hierarchical, placement_loads
from moe_placement.bound import gap, lower_bound
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits, CopyLimitsError, most_alike
from moe_placement.full import full_fractions
from moe_placement.placement import Placement, copies, faults
from moe_placement.score import rank_loads
from tests.support import split_oracle
from tests.support.planning_problems import Problem, loads, problems

EXACT = 1e-4


def planned(
    load: np.ndarray, slots: np.ndarray, speeds: np.ndarray, limits: CopyLimits | None = None
) -> tuple[Placement, np.ndarray]:
    """The plan, found valid, and its largest load ÷ speed [L]."""
    limits = limits or CopyLimits()
    before = load.copy()
    placement = Placement(*full_fractions.plan(load, slots, speeds, limits))
    assert np.array_equal(load, before), "the input is left alone"
    capacity = Capacity.of(slots.tolist(), speeds=speeds.tolist())
    experts_L = np.full(len(load), load.shape[1])
    assert list(faults(placement, experts_L, capacity)) == []
    assert placement_loads.faults(placement.slots_LRS, load.shape[1], placement.fractions_LRS) == []
    count_LE = copies(placement.slots_LRS, load.shape[1])
    assert count_LE.min() >= limits.min_copies
    assert count_LE.max() <= limits.most(int((slots > 0).sum()))
    loads_LR = rank_loads(placement.slots_LRS, placement.fractions_LRS, load)
    return placement, (loads_LR / speeds).max(axis=1)


@pytest.mark.parametrize("kind", placement_loads.LOADS)
@pytest.mark.parametrize("shape_key", list(placement_loads.SHAPES))
def test_known_shapes_are_balanced_exactly(shape_key: str, kind: str) -> None:
    """Alike ranks by the independent judge, and a quarter of the ranks at 0.7 over the ideal."""
    shape = placement_loads.SHAPES[shape_key]
    load = placement_loads.make_load(shape_key, kind, salt=4)
    slots = np.full(shape.ranks, shape.slots // shape.ranks)
    placement, _ = planned(load, slots, np.ones(shape.ranks))
    assert placement_loads.gap(placement.slots_LRS, load, placement.fractions_LRS).max() <= EXACT
    speeds = np.where(np.arange(shape.ranks) % 4 == 0, 0.7, 1.0)
    _, level_L = planned(load, slots, speeds)
    assert (level_L <= load.sum(axis=1) / speeds.sum() * (1 + EXACT)).all()


@settings(deadline=None, max_examples=70)
@given(st.data())
def test_exact_with_as_many_slots_as_experts_and_ranks_less_one(data: st.DataObject) -> None:
    """Any number of ranks (1, primes, more than experts), two or more slots each, any load."""
    num_ranks = data.draw(st.integers(1, 13))
    slots = data.draw(st.integers(2, 7))
    most = num_ranks * (slots - 1) + 1
    num_experts = data.draw(st.one_of(st.just(most), st.integers(1, most)))
    load = data.draw(loads(2, num_experts))
    placement, level_L = planned(load, np.full(num_ranks, slots), np.ones(num_ranks))
    assert (level_L <= load.sum(axis=1) / num_ranks * (1 + EXACT)).all()
    if num_experts >= num_ranks * slots:
        return
    wanted = min(num_ranks * slots, num_ranks * num_experts)
    assert ((placement.slots_LRS >= 0).sum(axis=(1, 2)) == wanted).all(), "no slot idles"


@settings(deadline=None, max_examples=70)
@given(problems(present=False, closed=False, ragged=False), st.data())
def test_valid_within_limits_whatever_the_ranks(problem: Problem, data: st.DataObject) -> None:
    """Unequal slots and speeds, no slots, zero loads, one expert with all the load, limits."""
    slots = problem.capacity.slots_R
    fewest = data.draw(st.integers(1, most_alike(problem.load_LE.shape[1], slots)))
    most = data.draw(st.one_of(st.none(), st.integers(fewest, fewest + 2)))
    _, level_L = planned(
        problem.load_LE, slots, problem.capacity.speeds_R, CopyLimits(fewest, most)
    )
    bound_L = lower_bound(problem.load_LE, slots, problem.capacity.speeds_R, most, fewest)
    assert (level_L >= bound_L * (1 - 1e-9)).all(), "better than possible"


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_never_worse_than_the_published_greedy_method(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 8))
    slots = data.draw(st.integers(1, 5))
    num_experts = data.draw(st.integers(1, num_ranks * slots))
    load = data.draw(loads(2, num_experts))
    greedy = greedy_hierarchical.plan(load, num_ranks * slots, num_ranks)
    greedy_level_L = placement_loads.rank_load(greedy, load).max(axis=1)
    _, level_L = planned(load, np.full(num_ranks, slots), np.ones(num_ranks))
    assert (level_L <= greedy_level_L * (1 + EXACT)).all()


@settings(deadline=None, max_examples=25)
@given(problems(present=False, closed=False, ragged=False))
def test_never_worse_than_most_loaded_first_with_one_copy_each(problem: Problem) -> None:
    load, capacity = problem.load_LE, problem.capacity
    slots = np.minimum(capacity.slots_R, load.shape[1])
    for limits in (CopyLimits(), CopyLimits(1, 1)):
        _, level_L = planned(load, capacity.slots_R, capacity.speeds_R, limits)
        for layer, load_E in enumerate(load):
            simple = most_loaded_first(load_E, slots, capacity.speeds_R)
            assert level_L[layer] <= simple * (1 + EXACT)


def test_a_worse_attempt_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the even planner deals experts out in their order."""
    load = np.random.default_rng(2).lognormal(0, 1, (4, 33))
    slots, speeds = np.array([5, 6, 5, 6, 5, 6]), np.array([1, 0.7, 1, 0.9, 1, 0.7])
    _, before_L = planned(load, slots, speeds)
    dealt = np.full((6, 6), -1, dtype=np.int32)
    dealt.T[np.arange(6)[:, None] < slots] = np.arange(33)
    monkeypatch.setattr(
        full_fractions.full_even, "plan", lambda load, *_: np.tile(dealt, (len(load), 1, 1))
    )
    _, after_L = planned(load, slots, speeds)
    assert (after_L <= before_L * 1.1).all()


def most_loaded_first(load_E: np.ndarray, slots_R: np.ndarray, speeds_R: np.ndarray) -> float:
    """Level of: each expert, the most loaded first, to the rank that is then least loaded."""
    free_R, load_R = slots_R.copy(), np.zeros(len(slots_R))
    for expert in np.argsort(-load_E, kind="stable"):
        level_R = np.where(free_R > 0, (load_R + load_E[expert]) / speeds_R, np.inf)
        rank = int(level_R.argmin())
        free_R[rank], load_R[rank] = free_R[rank] - 1, load_R[rank] + load_E[expert]
    return float((load_R / speeds_R).max())


LOAD_LAWS = {
    "lognormal": lambda rng, dims: rng.lognormal(0, 1, dims),
    "zipf": lambda rng, dims: rng.permuted(
        np.tile(np.arange(1, dims[1] + 1) ** -1.2, (dims[0], 1)), axis=1
    ),
}


@pytest.mark.parametrize("law", list(LOAD_LAWS))
@pytest.mark.parametrize(
    ("slots", "speeds"),
    [
        ([2, 2, 2], [1, 1, 1]),  # room exactly for the experts
        ([3, 2, 2], [1, 1, 1]),  # one link for three ranks
        ([3, 3, 3], [1, 0.5, 0.8]),
        ([4, 1, 3], [1, 1, 1]),
        ([4, 2, 2], [0.6, 1, 1]),
    ],
)
def test_near_the_best_of_all_placements(slots: list[int], speeds: list[float], law: str) -> None:
    """Six experts on three ranks, all placements enumerated."""
    load = LOAD_LAWS[law](np.random.default_rng(8), (20, 6))
    _, level_L = planned(load, np.array(slots), np.array(speeds, dtype=np.float64))
    every = split_oracle.placements(6, slots)
    best_L = np.array([split_oracle.enumerated_level(row, every, np.array(speeds)) for row in load])
    assert (level_L >= best_L * (1 - 1e-9)).all()
    assert (level_L / best_L - 1).max() <= 0.01
    assert (level_L / best_L - 1).mean() <= 0.001


@pytest.mark.parametrize(
    ("slots", "limits", "worst"),
    [
        (128, CopyLimits(), 0.02),  # room exactly for the experts
        (144, CopyLimits(), 0.006),  # half of the links
        (160, CopyLimits(1, 2), 0.05),
        (160, CopyLimits(1, 1), 0.02),
        (256, CopyLimits(2), 1e-4),
        (288, CopyLimits(2, 4), 0.006),
    ],
)
def test_beyond_the_theorem_gaps_are_small(slots: int, limits: CopyLimits, worst: float) -> None:
    load = placement_loads.make_load("b", "lognorm1.0", salt=6)[:24]
    slots_R = np.full(32, slots // 32)
    slots_R[: slots % 32] += 1
    _, level_L = planned(load, slots_R, np.ones(32), limits)
    bound_L = lower_bound(load, slots_R, np.ones(32), limits.max_copies, limits.min_copies)
    assert (level_L / bound_L - 1).max() <= worst


def test_ranks_of_any_speed_and_slots() -> None:
    """Prime numbers of everything, no two ranks alike."""
    rng = np.random.default_rng(11)
    load = rng.lognormal(0, 1, (13, 101))
    slots, speeds = rng.integers(4, 9, 23), rng.uniform(0.5, 1.0, 23)
    _, level_L = planned(load, slots, speeds)
    assert gap(level_L[:, None], np.ones(1), lower_bound(load, slots, speeds)).max() <= 1e-3


def test_a_layer_without_load_is_planned_as_if_loaded_alike() -> None:
    load = np.array([[0.0] * 6, [1.0] * 6])
    placement, _ = planned(load, np.full(4, 3), np.ones(4))
    assert np.array_equal(placement.slots_LRS[0], placement.slots_LRS[1])
    assert np.allclose(placement.fractions_LRS[0], placement.fractions_LRS[1])


def test_more_copies_than_fit_are_refused() -> None:
    with pytest.raises(CopyLimitsError, match="min_copies is 3"):
        full_fractions.plan(np.ones((1, 4)), np.full(2, 4), np.ones(2), CopyLimits(3))


@settings(deadline=None, max_examples=15)
@given(problems(present=False, closed=False, ragged=False))
def test_layers_are_planned_alone(problem: Problem) -> None:
    """A layer's plan does not depend on its neighbours, nor on the unit of load."""
    assume(len(problem.load_LE) > 1)
    args = (problem.capacity.slots_R, problem.capacity.speeds_R, CopyLimits())
    slots, fractions = full_fractions.plan(problem.load_LE, *args)
    for layer in range(len(slots)):
        alone = full_fractions.plan(problem.load_LE[layer : layer + 1], *args)
        assert np.array_equal(alone[0][0], slots[layer])
        assert np.allclose(alone[1][0], fractions[layer], rtol=0, atol=1e-9)
