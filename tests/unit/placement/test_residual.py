"""Where tokens could flow: as much as a maximum flow, and what lies behind a copy on trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from moe_api.plan import SlotsLRS
from moe_placement.step.residual import Residual

UNIT = 10**6
"""Capacities of the oracle are whole numbers."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, SlotsLRS, np.ndarray]:
    """Load in parts of a rank's capacity, complete placement, speeds."""
    num_ranks, num_slots = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    num_experts = draw(st.integers(num_slots, num_ranks * num_slots))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slots = np.full((3, num_ranks, num_slots), -1, dtype=np.int32)
    for layer in range(3):
        # One copy of every expert, then more as they come.
        slots[layer].flat[rng.permutation(slots[layer].size)[:num_experts]] = range(num_experts)
        for rank, slot in np.argwhere(slots[layer] < 0).tolist():
            expert = int(rng.integers(0, num_experts))
            if expert not in slots[layer, rank]:
                slots[layer, rank, slot] = expert
    load = rng.exponential(1, (3, num_experts)) * (rng.random((3, num_experts)) < 0.9)
    load *= num_ranks * draw(st.floats(0.3, 1.3)) / np.maximum(load.sum(axis=1, keepdims=True), 0.1)
    return load, slots, rng.choice([0.5, 1.0], num_ranks)


def most_served(load_E: np.ndarray, slots_RS: np.ndarray, speeds_R: np.ndarray) -> float:
    """What the ranks can take of all tokens, by another method: source - expert - rank - sink."""
    num_experts, num_ranks = len(load_E), len(slots_RS)
    ranks, slots = np.nonzero(slots_RS >= 0)
    experts = slots_RS[ranks, slots]
    tail = np.concatenate(
        [np.zeros(num_experts, int), 2 + experts, 2 + num_experts + np.arange(num_ranks)]
    )
    head = np.concatenate(
        [2 + np.arange(num_experts), 2 + num_experts + ranks, np.ones(num_ranks, int)]
    )
    room = np.concatenate([load_E * UNIT, np.full(len(experts), 10**9), speeds_R * UNIT])
    size = 2 + num_experts + num_ranks
    graph = csr_matrix((np.round(room).astype(np.int32), (tail, head)), shape=(size, size))
    return float(maximum_flow(graph, 0, 1).flow_value / UNIT)


@settings(deadline=None, max_examples=200)
@given(problems())
def test_what_stays_stuck_is_what_a_maximum_flow_leaves(
    case: tuple[np.ndarray, SlotsLRS, np.ndarray],
) -> None:
    load, slots, speeds = case
    residual = Residual.even(load, slots, speeds)
    stuck = residual.stuck_L()
    for layer in range(3):
        least = load[layer].sum() - most_served(load[layer], slots[layer], speeds)
        assert stuck[layer] == pytest.approx(least, abs=1e-4)
    tokens = residual.token_LRS
    assert (tokens >= 0).all()
    assert (tokens[slots < 0] == 0).all()
    assert np.allclose(tokens.sum(axis=2).ravel(), residual.loads_Q)
    layer_N, rank_N, slot_N = np.nonzero(slots >= 0)
    served = np.zeros_like(load)
    np.add.at(served, (layer_N, slots[layer_N, rank_N, slot_N]), tokens[layer_N, rank_N, slot_N])
    assert np.allclose(served, load), "no token is lost or made"


@settings(deadline=None, max_examples=50)
@given(problems())
def test_a_layer_settles_alike_whatever_the_others_do(
    case: tuple[np.ndarray, SlotsLRS, np.ndarray],
) -> None:
    load, slots, speeds = case
    together = Residual.even(load, slots, speeds).token_LRS
    for layer in range(3):
        alone = Residual.even(load[layer : layer + 1], slots[layer : layer + 1], speeds)
        assert np.array_equal(alone.token_LRS[0], together[layer])


def by_hand(*layers: list[list[tuple[int, float]]]) -> Residual:
    """Layers of ranks of (expert, tokens), ranks of speed 1."""
    num_ranks = max(len(layer) for layer in layers)
    slots = np.full((len(layers), num_ranks, 3), -1, dtype=np.int32)
    tokens = np.zeros(slots.shape)
    load = np.zeros((len(layers), 20))
    for layer, ranks in enumerate(layers):
        for rank, held in enumerate(ranks):
            for slot, (expert, served) in enumerate(held):
                slots[layer, rank, slot], tokens[layer, rank, slot] = expert, served
                load[layer, expert] += served
    return Residual(load, slots, tokens, np.ones(num_ranks))


# Rank 1 has all the room that is needed, but next to no tokens lead there; rank 3 is further away.
BEHIND_A_CRACK = [[(0, 0.6), (1, 1e-9), (2, 0.6)], [(1, 0.0)], [(2, 0.2), (3, 0.8)], [(3, 0.0)]]
# Only a third of what is too much on rank 0 fits through expert 0; the rest goes down a chain.
DOWN_A_CHAIN = [
    [(0, 0.1), (1, 1.2)],
    [(0, 0.0), (9, 0.4)],
    [(1, 0.0), (2, 1.0)],
    *([(rank, 0.1), (rank + 1, 0.3)] for rank in range(2, 9)),
]


def test_room_that_no_tokens_lead_to_does_not_end_the_search() -> None:
    residual = by_hand(BEHIND_A_CRACK)
    residual.settle()
    assert residual.stuck_L()[0] == 0.0
    assert residual.loads_Q[3] == pytest.approx(0.2)


def test_how_far_a_layer_looks_is_its_own_matter() -> None:
    together, alone = by_hand(BEHIND_A_CRACK, DOWN_A_CHAIN), by_hand(DOWN_A_CHAIN)
    together.settle()
    alone.settle()
    assert alone.stuck_L()[0] == 0.0
    assert np.array_equal(together.token_LRS[1], alone.token_LRS[0])


def chain() -> Residual:
    """Ranks 0 - 1 - 2 - 3, neighbours share experts 0, 1, 2; rank 3 has room for 0.5."""
    slots = np.array([[[0, 3], [0, 1], [1, 2], [2, -1]]], dtype=np.int32)
    tokens = np.array([[[0.4, 0.8], [0.7, 0.3], [0.2, 0.8], [0.5, 0.0]]])
    load = np.array([[1.1, 0.5, 1.3, 0.8]])
    return Residual(load, slots, tokens, np.ones(4))


def test_what_lies_behind_a_copy_is_limited_by_what_can_be_handed_on() -> None:
    residual = chain()
    absorb = residual.absorb()
    behind = dict(zip(residual.edges.slot_N.tolist(), absorb.by_rank_N.tolist(), strict=True))
    # Flat slots: rank 3 itself; rank 2 hands on up to 0.8 of expert 2, rank 1 0.3 of expert 1.
    assert behind[6] == pytest.approx(0.5)
    assert behind[4] == pytest.approx(0.5)
    assert behind[2] == pytest.approx(0.3)
    others = dict(zip(residual.edges.slot_N.tolist(), absorb.by_others_N.tolist(), strict=True))
    assert others[0] == pytest.approx(0.3), "rank 0 could hand on so much of expert 0"
    assert others[6] == 0.0, "nobody before rank 3 has room"


def test_an_excess_flows_as_far_as_it_can() -> None:
    residual = chain()
    assert residual.stuck_L()[0] == pytest.approx(0.2)
    residual.settle()
    assert residual.stuck_L()[0] == 0.0
    assert residual.loads_Q.tolist() == pytest.approx([1.0, 1.0, 1.0, 0.7])


def test_tokens_of_a_slot_that_changes_go_to_the_other_copies() -> None:
    residual = chain()
    slots = residual.slots_LRS.copy()
    slots[0, 2, 0] = 3
    residual.change(slots, residual.absorb().by_rank_N)
    assert residual.token_LRS[0, 1].tolist() == pytest.approx([0.7, 0.5])
    assert residual.token_LRS[0, 2, 0] == 0.0
    assert residual.loads_Q.tolist() == pytest.approx([1.2, 1.2, 0.8, 0.5])
